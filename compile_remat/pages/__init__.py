"""What a person looks at: one HTML page, a picture in a notebook, a matplotlib figure, all of plain figures (`figures`).

Nothing here knows of graphs, planners or torch: `compile_remat.passes.pictures` works the figures out.
"""
