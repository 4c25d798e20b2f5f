"""Torch's state of the processes that train together.  Imports nothing of compile_remat."""
