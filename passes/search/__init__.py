"""Searches plans for a budget: cuts, segments, local search, recursion, bounds.

The modules need no torch.  `memory` tells them the cost of a plan.
"""
