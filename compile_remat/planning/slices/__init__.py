"""Chooses the number of slices in which the rows of huge temporaries are computed, as a part of a graph's plan."""
