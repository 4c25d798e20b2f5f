"""The kernels that Inductor makes of C++: called one by one, and built together."""
