"""The kernels that Inductor makes: built once a plan is kept, and those of C++ called one by one and built together."""
