"""Moves that improve one plan: flips, swaps, exchanged windows, random neighbours.  Nothing here chooses where a search starts."""
