"""Training on several ranks that are not here: what one of them holds, its graphs, and the time of its step.

One process stands for rank 0 of the mesh.  A step is one graph, or, under FSDP2 by blocks, one for each block and one for each part
around them; FSDP2's collectives lie between the graphs and are counted around them.
"""
