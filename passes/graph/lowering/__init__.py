"""What Inductor's lowering makes of each node of a joint graph, for every plan: expressions, kernels, buffers and their layout.

The passes write on the drafts of a graph, in the order in which `passes.graph.build` lists them.
"""
