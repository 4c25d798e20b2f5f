"""Plans, memory and time of a model for a device that need not be present.

Traces with fake tensors.  Compiles and runs no code.
"""
