"""Rewrites of the joint graph or the backward: each takes an FX graph, changes it in place and keeps its results.

One rewrite a module, each with a golden test.
"""
