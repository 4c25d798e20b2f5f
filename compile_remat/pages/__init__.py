"""Pictures of plans: an HTML page, a picture in a notebook, a matplotlib figure, a trace, all drawn from plain data (`figures`).

No module here uses graphs, planners or torch: `compile_remat.passes.pictures` computes the figures.
"""
