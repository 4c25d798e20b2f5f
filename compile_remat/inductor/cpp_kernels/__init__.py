"""Inductor's kernels: built once a plan is taken; C++ kernels are called one by one and built together."""
