"""Slices: the rows of huge temporaries are computed one part after the other, by one graph that is called for each slice.

The modules hold the operators that keep rows apart, regions of such operators, and the graph of a slice.
Nothing here depends on Inductor, budgets or plans: the caller (`planning.variants`) gives the number of slices.
"""
