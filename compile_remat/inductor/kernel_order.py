"""Inductor's kernels in the plan's order: in a backward, a kernel that Inductor puts off goes back to where it frees memory.

Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15 but for the class of passes, which 2.11 has none of.
Inductor writes a pointwise value where something first needs it written.  A convolution's backward needs its incoming gradient
and its input, which the plan recomputes just before it: the gradient's kernel came behind the recomputed segment,
and what it reads stayed alive beside that: a fifth more at the peak, at least (``pytest tests/inductor/test_kernel_order.py``).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from compile_remat._torch.version import private_name
from compile_remat.inductor.fusion_guard import OF_THE_CALLER, Kernel, reused_bytes

V = private_name("torch._inductor.virtualized", "V")

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default

SMALL_PART = 256
"""A kernel that frees no more than this part of the largest buffer stays where it is."""


def move_kernels_up(nodes: list[Any]) -> list[Any]:
    """The nodes of a scheduler, before any are joined, in their new order; the same list where none moves.

    Forwards keep Inductor's order, which the planner knows.
    """
    graph = V.graph.module.graph
    if not V.graph.is_backward or not graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD):
        return nodes
    row = Row(nodes, V.graph.get_output_names(), graph.nodes)
    return row.nodes if row.move_up() else nodes


class Row:
    """Nodes of a scheduler in an order, and what is alive along them.

    Args:
        nodes: The scheduler's, in a topological order.
        returned: Names of the buffers that the graph returns.
        planned: The nodes of the graph that they were made from, in the plan's order.
    """

    def __init__(self, nodes: Sequence[Any], returned: Iterable[str], planned: Iterable[Any]) -> None:
        self.nodes, self.returned = list(nodes), frozenset(returned)
        ranks = {node: rank for rank, node in enumerate(planned)}
        self.ranks = {node: _rank(node, ranks) for node in nodes}
        self.places = {node: place for place, node in enumerate(nodes)}
        self.kernels = {node: Kernel.of(node.get_nodes()) for node in nodes}
        self.maker = {name: node for node, kernel in self.kernels.items() for name in kernel.writes}
        self.readers: dict[str, list[Any]] = {}
        self.nbytes: dict[str, int] = {}
        for node, kernel in self.kernels.items():
            for name in kernel.reads:
                self.readers.setdefault(name, []).append(node)
            for dep in (*node.read_writes.reads, *node.read_writes.writes):
                self.nbytes[dep.name] = max(self.nbytes.get(dep.name, 0), int(node.scheduler.dep_size_hint(dep)))
        self.small_bytes = max(self.nbytes.values(), default=0) // SMALL_PART

    def move_up(self) -> int:
        """Move kernels that make a convolution's gradient and free more than they make to their places in the plan.

        None goes where more would be in use then.

        Returns:
            How many were moved.
        """
        moved = 0
        for node in list(self.nodes):
            end = self.places[node]
            if node.is_extern() or node.is_template() or not self._feeds_convolution(node) or not self._shrinks(node):
                continue
            begin = max((self.places[maker] for maker in self._awaited(node)), default=-1) + 1
            later = (k for k in range(begin, end) if self.ranks[self.nodes[k]] > self.ranks[node])
            begin = next(later, end)
            if begin == end:
                continue
            before = self.nodes[begin : end + 1]
            after = [node, *before[:-1]]
            if self._peak_bytes(after, begin) <= self._peak_bytes(before, begin):
                self.nodes[begin : end + 1] = after
                self.places.update({each: begin + k for k, each in enumerate(after)})
                moved += 1
        return moved

    def _feeds_convolution(self, node: Any) -> bool:
        """Whether a convolution's backward reads what the node makes, itself or a copy of it in another order.

        Elsewhere kernels stay: with its pointwise kernels moved, an unrolled recurrent cell at 0.3 measured 45.9 MiB of a budget
        of 44.0, as others were joined then (``python -m benchmarks.promise --model recurrent``).
        """
        near = [reader for name in self.kernels[node].writes for reader in self.readers.get(name, ())]
        far = [reader for each in near for name in self.kernels[each].writes for reader in self.readers.get(name, ())]
        return any(getattr(each.node, "op_overload", None) is CONVOLUTION_BACKWARD for each in (*near, *far))

    def _awaited(self, node: Any) -> list[Any]:
        """The nodes that must run before this one; for one that writes in place, also who reads what was there."""
        names = {dep.name for part in node.get_nodes() for dep in part.unmet_dependencies}
        return [self.maker[name] for name in names if name in self.maker and self.maker[name] is not node]

    def _shrinks(self, node: Any) -> bool:
        """Whether less is in use after the node than before it, and not by some sum of a bias' gradient."""
        kernel, place = self.kernels[node], self.places[node]
        freed = {name for name in kernel.reads if self._dies_by(name, self.places, place)}
        return self._bytes(freed) - self._bytes(kernel.writes) > self.small_bytes

    def _dies_by(self, name: str, places: Mapping[Any, int], place: int) -> bool:
        """Whether nothing reads it behind the place."""
        if name in self.returned or (name not in self.maker and name.startswith(OF_THE_CALLER)):
            return False
        return all(places[reader] <= place for reader in self.readers[name])

    def _peak_bytes(self, nodes: Sequence[Any], begin: int) -> int:
        """The most in use while these run from place `begin` on, above what was when the first of them began."""
        places = ChainMap({node: begin + k for k, node in enumerate(nodes)}, self.places)
        level = peak = 0
        for place, node in enumerate(nodes, begin):
            kernel = self.kernels[node]
            freed = {name for name in kernel.reads if self._dies_by(name, places, place)}
            again = reused_bytes(kernel, kernel.writes, freed, self.nbytes)
            level += self._bytes(kernel.writes) - again
            peak = max(peak, level)
            level += again - self._bytes(freed)
        return peak

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self.nbytes.get(name, 0) for name in names)


def _rank(node: Any, ranks: Mapping[Any, int]) -> int:
    """Where the plan computes what a node of the scheduler writes; a copy belongs to what it is made for."""
    origin = node.node.origin_node if node.node is not None else None
    if origin in ranks:
        return ranks[origin]
    return max(
        (ranks[each] for each in (node.node.origins if node.node is not None else ()) if each in ranks), default=-1
    )
