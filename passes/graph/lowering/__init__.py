"""Lowering: predicts Inductor's expressions, kernels, buffers and layouts for each node of a joint graph, for every plan.

The passes set fields of a graph's drafts, in the order in which `passes.graph.build` lists them.
"""
