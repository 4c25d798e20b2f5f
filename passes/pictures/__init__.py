"""Computes the figures of a page (`compile_remat.pages.figures`) from a `Problem` and a `Plan`: no torch, no drawing."""
