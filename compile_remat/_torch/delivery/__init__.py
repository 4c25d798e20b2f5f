"""Early gradients, which leave a compiled backward once computed: the operators, autograd's side and Inductor's.  No policy.

The rewrite of the graph is `passes.graph.rewrites.early_gradients`, whose docstring names the other parts.
"""
