"""Rewrites of the joint graph or the backward: each changes an FX graph in place and keeps its results.

Each module holds one rewrite, which has a golden test.
"""
