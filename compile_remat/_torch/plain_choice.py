"""What plain torch.compile saves: torch's default cut, with a max-flow of our own.

Torch builds the network of its cut and hands it to networkx, whose max-flow in Python takes most of the time.  Here a copy of
torch's own functions runs, in which ``import networkx`` finds `_Network` below; torch itself is left alone.  The network holds
integers far beyond the 32 bits of scipy's max-flow.  So the flow is found by capacity scaling: most of it in units of 2**k, then
what is left of it in the residual network in smaller units, down to 1.  Of all minimum cuts it is networkx's, the one nearest to
the sink.

Private names: ``torch._functorch.partitioners``, `solve_min_cut` and `choose_saved_values_set`; same in 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import builtins
import math
import types
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat._torch.joint_graph import Joint, P

UNLIMITED = 1 << 60
MOST = 1 << 29
"""A flow up to this stays far inside 32 bits."""


def plain_choice(joint: Joint) -> list[fx.Node]:
    """The values that plain torch.compile saves, inputs and symbols included: those of `joint_graph.torch_choice`."""
    joint_graph.mark_distances(joint)
    try:
        return list(_choose(joint.module.graph, joint.info, memory_budget=1.0))
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
    ):  # another torch builds its network otherwise
        return joint_graph.torch_choice(joint)


class _Unbounded(Exception):
    """The network has a path of unlimited arcs: then torch's own chooser says what is wrong."""


class _Network:
    """As much of ``networkx.DiGraph`` as torch's cut uses."""

    def __init__(self) -> None:
        self.arcs: dict[str, dict[str, float]] = {}

    def __getitem__(self, name: str) -> dict[str, float]:
        return self.arcs[name]

    def add_edge(self, tail: str, head: str, *, capacity: float, **_: object) -> None:
        """Add an arc, or replace its capacity."""
        self.arcs.setdefault(tail, {})[head] = capacity
        self.arcs.setdefault(head, {})


def _minimum_cut(network: _Network, source: str, sink: str) -> tuple[int, tuple[set[str], set[str]]]:
    """The value of the cut; the names on the source's side and those from which the residual network leads to the sink."""
    names = list(network.arcs)
    index = {name: k for k, name in enumerate(names)}
    tails, heads, capacities = [], [], []
    for tail, arcs in network.arcs.items():
        for head, capacity in arcs.items():
            tails.append(index[tail])
            heads.append(index[head])
            capacities.append(UNLIMITED if math.isinf(capacity) else int(capacity))
    size = (len(names), len(names))
    residual = csr_array((np.array(capacities, dtype=np.int64), (tails, heads)), shape=size)
    value, residual = _saturated(residual, index[source], index[sink])
    residual.eliminate_zeros()
    reaching = {names[k] for k in breadth_first_order(residual.T.tocsr(), index[sink], return_predecessors=False)}
    return value, (set(names) - reaching, reaching)


def _saturated(residual: csr_array, source: int, sink: int) -> tuple[int, csr_array]:
    """The maximum flow, and what it leaves of the capacities."""
    value, left = 0, int(residual.data[residual.data < UNLIMITED].sum()) + 1  # no more than this can still flow
    while left:
        unit = 1 << max(0, left.bit_length() - MOST.bit_length())
        units = residual.copy()
        units.data = np.minimum(residual.data, left) // unit
        flow = maximum_flow(units.astype(np.int32), source, sink)
        if flow.flow_value * unit >= left:
            raise _Unbounded
        value += flow.flow_value * unit
        residual = residual - flow.flow.astype(np.int64) * unit
        left = 0 if unit == 1 else residual.nnz * unit
    return value, residual


_NETWORKX = types.SimpleNamespace(DiGraph=_Network, minimum_cut=_minimum_cut, NetworkXUnbounded=_Unbounded)


def _import(name: str, *others: Any) -> Any:
    return _NETWORKX if name == "networkx" else builtins.__import__(name, *others)


def _copies() -> dict[str, Any]:
    """The names of torch's module, with copies of the two functions that read them from here."""
    names = {**vars(P), "__builtins__": {**vars(builtins), "__import__": _import}}
    for name in ("solve_min_cut", "choose_saved_values_set"):
        function = getattr(P, name)
        names[name] = types.FunctionType(function.__code__, names, name, function.__defaults__, function.__closure__)
        names[name].__kwdefaults__ = function.__kwdefaults__
    return names


_choose = _copies()["choose_saved_values_set"]
