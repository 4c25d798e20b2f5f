"""Splits a joint graph into forward and backward under its plan: the partitioner that Inductor calls, and its fallback."""
