"""The places of offload's operators among the kernels of a graph, before any fusion.

Inductor puts operators that nothing waits for where its own order has them: a stash right before its release, so that nothing is
copied meanwhile.  Here a stash follows the kernel that completes its tensor, an arrival stands before the first kernel that reads
the tensor, and release and fetch stand where the plan has them in the graph.

Private names of ``torch._inductor``, same in 2.11 to 2.15: ``MultiOutput`` and ``ExternKernel.op_overload`` of ``ir``, and
``unmet_dependencies`` and ``get_buffer_names`` of scheduler nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from compile_remat._torch.offload.offload_ops import ARRIVED, FETCH, RELEASE, STASH
from compile_remat._torch.version import private_name

MultiOutput = private_name("torch._inductor.ir", "MultiOutput")

OPERATORS = (STASH, RELEASE, FETCH, ARRIVED)


class CopiesMisplaced(RuntimeError):
    """Inductor uses a tensor at a place where its copy to or from the host does not allow that; says which."""


def has_copies(nodes: Iterable[Any]) -> bool:
    """Returns whether the scheduler's nodes have an operator of offload."""
    return any(_operator(node) in OPERATORS for node in nodes)


def place_copies(nodes: list[Any], ranks: Mapping[str, int]) -> list[Any]:
    """Returns the scheduler's nodes with offload's operators at their places.

    Args:
        nodes: Scheduler nodes in a topological order.
        ranks: Place of each node in the plan's order, by the name of the scheduler node; -1 if unknown.

    Raises:
        CopiesMisplaced: A kernel reads a tensor on the host, whose copy nothing has waited for.
    """
    groups = _groups(nodes)
    _check_host(nodes, groups)
    moved = {id(node) for group in groups for node in group}
    rest = [node for node in nodes if id(node) not in moved]
    places = {name: place for place, node in enumerate(rest) for name in node.get_buffer_names()}
    order = np.array([ranks.get(node.get_name(), -1) for node in rest], dtype=np.int64)
    behind: dict[int, list[list[Any]]] = {}
    for group in sorted(groups, key=lambda group: ranks.get(group[0].get_name(), -1)):
        own = _place(group, rest, places, order, ranks.get(group[0].get_name(), -1))
        places |= {name: own for node in group for name in node.get_buffer_names()}
        behind.setdefault(own, []).append(group)
    found: list[Any] = [node for group in behind.get(-1, ()) for node in group]
    for place, node in enumerate(rest):
        found.append(node)
        found += [each for group in behind.get(place, ()) for each in group]
    return found


def _groups(nodes: Sequence[Any]) -> list[list[Any]]:
    """Each operator of offload with the nodes that stand for its results."""
    groups = {node.get_name(): [node] for node in nodes if _operator(node) in OPERATORS}
    makers = {name: group for group in groups.values() for name in group[0].get_buffer_names()}
    for node in nodes:
        if isinstance(node.node, MultiOutput):
            for name in _awaited(node):
                if name in makers:
                    makers[name].append(node)
    return list(groups.values())


def _check_host(nodes: Iterable[Any], groups: Iterable[Sequence[Any]]) -> None:
    """Raise if a kernel reads the tensor that a stash makes: it is for the backward alone."""
    stashed = {
        name for head, *made in groups if _operator(head) is STASH for n in made for name in n.get_buffer_names()
    }
    for node in nodes:
        read = stashed.intersection(_awaited(node))
        if read and _operator(node) is not RELEASE:
            raise CopiesMisplaced(f"{node.get_name()} reads {min(read)}, which waits on the host")


def _place(group: Sequence[Any], rest: Sequence[Any], places: Mapping[str, int], order: Any, rank: int) -> int:
    """The place in `rest` of the node behind which a group belongs, -1 for the front."""
    head = group[0]
    earliest = max((places[name] for name in _awaited(head) if name in places), default=-1)
    if _operator(head) is STASH:
        return earliest
    own = {name for node in group for name in node.get_buffer_names()}
    readers = (place for place, node in enumerate(rest) if not own.isdisjoint(_awaited(node)))
    latest = next(readers, len(rest)) - 1
    if _operator(head) is ARRIVED:
        return max(earliest, latest)
    return max(earliest, min(latest, _planned(order, rank)))


def _planned(order: Any, rank: int) -> int:
    """The place behind which the fewest nodes stand on the other side of an operator than in the plan."""
    earlier = np.concatenate([[0], np.cumsum((order >= 0) & (order < rank))])
    later = np.concatenate([[0], np.cumsum(order > rank)])
    wrong = later + (earlier[-1] - earlier)
    return int(np.argmin(wrong)) - 1


def _operator(node: Any) -> object:
    return getattr(node.node, "op_overload", None)


def _awaited(node: Any) -> Iterable[str]:
    """Names of the buffers that a node waits for, to read them or to write behind their readers."""
    return [dep.name for dep in node.unmet_dependencies]
