"""FX graphs: rewrites of the joint graph, the problem built from it, and the modules extracted for a plan.

The only part of `passes` that imports torch.  Chooses nothing.
"""
