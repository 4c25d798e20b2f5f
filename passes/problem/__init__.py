"""The planning problem and its plan as plain data, and the work that a search may spend.

Standard library and numpy alone.
"""
