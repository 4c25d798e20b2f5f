"""Bools in bits: the operators that stand for it in a joint graph, and what they are made of.  No policy."""
