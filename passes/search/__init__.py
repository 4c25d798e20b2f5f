"""Plans for a budget: cuts, segments, local search, recursion, bounds.

Free of torch.  Asks `memory` what a plan costs.
"""
