"""Early gradients, which leave a compiled backward once computed: the operators, autograd's side and Inductor's.  No policy."""
