"""Which bytes live when: liveness of plans on a problem, forward and backward.

Numpy alone.  Chooses nothing.
"""
