"""Rows of huge temporaries computed in slices: which operators keep rows apart, regions of them, one body for every slice.

Nothing here knows of Inductor, of budgets or of plans: the number of slices is given.
"""
