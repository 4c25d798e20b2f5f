"""Plans, memory and time of a model for a device that need not be here.

Traces on fake tensors.  Compiles and runs nothing.
"""
