"""Training on several ranks that need not be present: the memory, the graphs and the step time of one of them.

One process stands for rank 0 of the mesh.  A step is one graph or, with FSDP2 around blocks, one graph for each block and for each
part between blocks.  FSDP2's collectives run between the graphs and are counted separately.
"""
