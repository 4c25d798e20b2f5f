"""Offload: saved tensors that wait for the backward in host memory: operators, streams of copies, Inductor's side.  No policy."""
