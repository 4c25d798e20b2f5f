"""FX graphs: rewrites of the joint graph, the problem built from it, and the modules extracted for a plan.

Only this part of `passes` imports torch.  The code here makes no choice between plans.
"""
