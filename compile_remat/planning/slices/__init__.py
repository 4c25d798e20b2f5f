"""How many slices the rows of huge temporaries are computed in, as a part of a graph's plan."""
