"""The planning problem and its plan as plain data, and the work that a search may spend.

The modules need numpy and the standard library alone.
"""
