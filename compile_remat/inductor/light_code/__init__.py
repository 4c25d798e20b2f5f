"""The wrapper code of a graph without its kernels, read from Inductor's scheduler before any kernel is written."""
