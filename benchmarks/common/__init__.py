"""Code that the benchmarks share: one training step compiled and measured, problems made by hand, tables, files and pictures.

Nothing here is a command; the commands are the modules of `benchmarks` itself.
"""
