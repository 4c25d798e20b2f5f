"""Offload: saved values that wait for the backward in host memory, chosen together with recomputation."""
