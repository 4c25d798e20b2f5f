"""Private names of torch outside Inductor: one module per concern, each of which names the torch versions that have them.

Imports nothing of compile_remat but `_torch` and `_util`.  Code that plans, prices or compiles belongs elsewhere.
"""
