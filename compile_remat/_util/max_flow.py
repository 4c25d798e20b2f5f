"""The part of networkx that torch's min-cut of a joint graph uses, with a max-flow by scipy.

Torch's capacities are integers far beyond the 32 bits of scipy's max-flow.  So the flow is found by capacity scaling: most of the
flow in units of 2**k, then the rest in the residual network in smaller units, down to 1.  Of all minimum cuts, the result is the
one nearest to the sink, as in networkx.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

UNLIMITED = 1 << 60
MOST = 1 << 29
"""Largest capacity in units of one scaling step; flows up to this stay far inside 32 bits."""


class NetworkXUnbounded(Exception):
    """The network has a path of unlimited arcs."""


class DiGraph:
    """A directed graph with capacities; `arcs` maps the name of an arc's tail and head to its capacity."""

    def __init__(self) -> None:
        self.arcs: dict[str, dict[str, float]] = {}

    def __getitem__(self, name: str) -> dict[str, float]:
        return self.arcs[name]

    def add_edge(self, tail: str, head: str, *, capacity: float, **_: object) -> None:
        """Add an arc, or replace its capacity."""
        self.arcs.setdefault(tail, {})[head] = capacity
        self.arcs.setdefault(head, {})


def minimum_cut(network: DiGraph, source: str, sink: str) -> tuple[int, tuple[set[str], set[str]]]:
    """Returns the value of the cut, and the names on the source's side and on the sink's side.

    The sink's side is the set of names from which the residual network leads to the sink.

    Raises:
        NetworkXUnbounded: A path of unlimited arcs leads from the source to the sink.
    """
    names = list(network.arcs)
    index = {name: k for k, name in enumerate(names)}
    tails, heads, capacities = [], [], []
    for tail, arcs in network.arcs.items():
        for head, capacity in arcs.items():
            tails.append(index[tail])
            heads.append(index[head])
            capacities.append(UNLIMITED if math.isinf(capacity) else int(capacity))
    size = (len(names), len(names))
    residual = scipy.sparse.csr_array((np.array(capacities, dtype=np.int64), (tails, heads)), shape=size)
    value, residual = _saturated(residual, index[source], index[sink])
    residual.eliminate_zeros()
    backwards = residual.T.tocsr()
    order = scipy.sparse.csgraph.breadth_first_order(backwards, index[sink], return_predecessors=False)
    reaching = {names[k] for k in order}
    return value, (set(names) - reaching, reaching)


def _saturated(residual: scipy.sparse.csr_array, source: int, sink: int) -> tuple[int, scipy.sparse.csr_array]:
    """Returns the value of the maximum flow, and the capacities of the residual network, shape [names, names]."""
    value, left = 0, int(residual.data[residual.data < UNLIMITED].sum()) + 1  # upper bound of the remaining flow
    while left:
        unit = 1 << max(0, left.bit_length() - MOST.bit_length())
        units = residual.copy()
        units.data = np.minimum(residual.data, left) // unit
        flow = scipy.sparse.csgraph.maximum_flow(units.astype(np.int32), source, sink)
        if flow.flow_value * unit >= left:
            raise NetworkXUnbounded
        value += flow.flow_value * unit
        residual = residual - flow.flow.astype(np.int64) * unit
        left = 0 if unit == 1 else residual.nnz * unit
    return value, residual
