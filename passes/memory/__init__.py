"""Liveness model: the live bytes of plans at each place of the forward and at each slot of the backward.

The modules need numpy alone, no torch, and choose no plan.
"""
