"""Private names of torch outside Inductor, one concern a module, each saying which versions have it.

Imports nothing of ours but `_torch`.  What plans, prices or compiles belongs elsewhere.
"""
