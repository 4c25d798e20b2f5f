"""Measured times: operators replayed on this machine, microbenchmarks, and device figures fitted to these."""
