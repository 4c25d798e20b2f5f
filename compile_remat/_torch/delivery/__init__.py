"""Gradients that leave a compiled backward when they are made: the operators, autograd's side of it, and Inductor's.  No policy."""
