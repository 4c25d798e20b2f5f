"""Measured times: operators replayed on this machine, microbenchmarks, and figures fitted to them."""
