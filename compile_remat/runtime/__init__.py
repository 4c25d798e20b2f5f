"""Runs compiled graphs: measured peaks, the budget of a whole step, recovery from out-of-memory.

Compiles nothing itself; passes requests to the compile function that it is given.
"""
