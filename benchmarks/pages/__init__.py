"""Writes the tables of README.md, docs/results.md and docs/results/ from the stored results; nothing is measured here."""
