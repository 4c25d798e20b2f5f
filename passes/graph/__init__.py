"""FX graphs: rewrites of the joint graph, the problem built from it, and the modules extracted for a plan.

This is the only part of `passes` that imports torch.  It makes no choice between plans.
"""
