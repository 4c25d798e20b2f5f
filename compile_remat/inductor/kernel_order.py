"""Orders Inductor's kernels by the plan: in a backward, a kernel that Inductor delays moves back to where it frees memory.

Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15 but for the class of passes.
Inductor writes a pointwise value to memory just before the first kernel that needs it there, and until then the inputs of the
value stay alive.  A convolution's backward reads its incoming gradient and its input, and the plan recomputes that input just
before.  Inductor ran the gradient's kernel after the recomputed segment, which raised the peak by a fifth
(``pytest tests/inductor/test_kernel_order.py``).  A physics-informed net took 67.9 MB in place of 57.3
(``python -m benchmarks.zoo --model pinn_burgers``).

For a scatter that calls ATen's kernel, Inductor writes the initial buffer (zeros) before it computes the scattered values: the
zeros were live beside all inputs of those values.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from compile_remat._torch.offload.copy_order import has_copies, place_copies
from compile_remat._torch.version import private_name, torch_version
from compile_remat.inductor.scheduler_graph import Kernel, SchedulerGraph

V = private_name("torch._inductor.virtualized", "V")
InvokeSubgraph = private_name("torch._inductor.ir", "InvokeSubgraph")
NonOwningLayout = private_name("torch._inductor.ir", "NonOwningLayout")
SCATTERS: tuple[type, ...] = tuple(
    private_name("torch._inductor.ir", name) for name in ("ScatterFallback", "IndexPutFallback")
)
"""Inductor's calls of ATen kernels that write elements into their first operand, in place."""

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default

SMALL_PART = 256
"""Divisor: a kernel that frees at most 1/256 of the largest buffer's bytes stays where it is."""


def move_kernels(nodes: list[Any]) -> list[Any]:
    """Returns the scheduler's nodes, before any fusion, in their new order; the same list if none moves.

    A forward keeps Inductor's order, which the planner knows, except for concatenated outputs of region calls and for scatters.
    """
    nodes, graph = join_at_once(nodes), V.graph.module.graph
    if has_copies(nodes):
        ranks = {node: rank for rank, node in enumerate(graph.nodes)}
        nodes = place_copies(nodes, {node.get_name(): _rank(node, ranks) for node in nodes})
    if any(isinstance(node.node, SCATTERS) for node in nodes):
        sequence = KernelSequence(nodes, V.graph.get_output_names(), graph.nodes)
        nodes = sequence.nodes if sequence.move_starts_down() else nodes
    if not V.graph.is_backward or not nodes:
        return nodes
    sequence = KernelSequence(nodes, V.graph.get_output_names(), graph.nodes)
    return sequence.nodes if sequence.move_up() else nodes


def join_at_once(nodes: list[Any]) -> list[Any]:
    """Returns the nodes with each copy into a concatenation right after the copied buffer's kernel; the same list if none moves.

    Inductor puts all copies at the concatenation: the outputs of all region calls were live beside the concatenated buffer.
    """
    if not any(isinstance(node.node, InvokeSubgraph) for node in nodes):
        return nodes
    places = {name: place for place, node in enumerate(nodes) for name in node.get_buffer_names()}
    behind: dict[int, list[Any]] = {}
    for place, node in enumerate(nodes):
        is_copy = isinstance(getattr(node.node, "layout", None), NonOwningLayout) and not node.is_extern()
        latest = max((places[d.name] for d in node.unmet_dependencies if d.name in places), default=-1)
        behind.setdefault(latest if is_copy and latest >= 0 else place, []).append(node)
    moved = [node for place in sorted(behind) for node in sorted(behind[place], key=lambda n: n is not nodes[place])]
    return moved if moved != nodes else nodes


class KernelSequence:
    """A scheduler's nodes in one order, and the buffers that are live along it.

    Args:
        nodes: Scheduler nodes in a topological order.
        returned: Names of the buffers that the graph returns.
        planned: FX nodes of the lowered graph, in the plan's order.
    """

    def __init__(self, nodes: Sequence[Any], returned: Iterable[str], planned: Iterable[Any]) -> None:
        self.nodes = list(nodes)
        self.graph = SchedulerGraph(nodes, nodes[0].scheduler.dep_size_hint, returned)
        ranks = {node: rank for rank, node in enumerate(planned)}
        self.ranks = {node.get_name(): _rank(node, ranks) for node in nodes}
        self.along = np.array([self.ranks[node.get_name()] for node in nodes])  # ranks by place
        self.places = {node.get_name(): place for place, node in enumerate(nodes)}
        self.kernels = {node.get_name(): Kernel.of(node.get_nodes()) for node in nodes}
        self.small_bytes = max(self.graph.nbytes.values(), default=0) // SMALL_PART

    def move_up(self) -> int:
        """Move each of Inductor's own kernels that frees more bytes than it writes up to its place in the plan.

        A kernel stays where it is if the move would raise the peak.

        Returns:
            Number of moved kernels.
        """
        moved = 0
        for node in list(self.nodes):
            name = node.get_name()
            if node.is_extern() or node.is_template() or not self._shrinks(name):
                continue
            end = self.places[name]
            begin = max((self.places[maker] for maker in self._awaited(node)), default=-1) + 1
            later = np.flatnonzero(self.along[begin:end] > self.ranks[name])
            if not len(later):
                continue
            begin += int(later[0])
            before = self.nodes[begin : end + 1]
            after = [node, *before[:-1]]
            if self._peak_bytes(after, begin) <= self._peak_bytes(before, begin):
                self._put(after, begin)
                moved += 1
        return moved

    def move_starts_down(self) -> int:
        """Move each kernel that writes a scatter's initial buffer down to right before the scatter.

        A kernel stays where it is if the move would raise the peak, or if another node reads the buffer earlier.

        Returns:
            Number of moved kernels.
        """
        moved = 0
        for scatter in [node for node in self.nodes if isinstance(node.node, SCATTERS)]:
            end = self.places[scatter.get_name()]
            for name in self._starts_of(scatter):
                begin = self.places[name]
                if any(self.places[reader] < end for reader in self._readers_of(name)):
                    continue
                before = self.nodes[begin:end]
                after = [*before[1:], before[0]]
                if len(before) > 1 and self._peak_bytes(after, begin) <= self._peak_bytes(before, begin):
                    self._put(after, begin)
                    moved += 1
        return moved

    def _starts_of(self, scatter: Any) -> list[str]:
        """Names of Inductor's own kernels that write the buffers which the scatter modifies."""
        written = [name for buffer in scatter.get_outputs() for name in buffer.get_mutations()]
        makers = [self.graph.maker[name] for name in written if name in self.graph.maker]
        return [maker for maker in makers if self.kernels[maker].accesses]

    def _put(self, nodes: Sequence[Any], begin: int) -> None:
        for place, node in enumerate(nodes, begin):
            self.nodes[place] = node
            self.places[node.get_name()] = place
            self.along[place] = self.ranks[node.get_name()]

    def _readers_of(self, name: str) -> set[str]:
        """Names of the nodes that read an output of a node."""
        return {reader for made in self.kernels[name].writes for reader in self.graph.readers.get(made, ())}

    def _awaited(self, node: Any) -> list[str]:
        """Names of the nodes that must run before this node; if it writes in place, also of the readers of the old content."""
        names = {dep.name for part in node.get_nodes() for dep in part.unmet_dependencies}
        makers = [self.graph.maker[name] for name in names if name in self.graph.maker]
        return [maker for maker in makers if maker != node.get_name()]

    def _shrinks(self, name: str) -> bool:
        """True if the node frees over `small_bytes` more than it writes; the sum of a bias gradient saves less than that."""
        kernel, place = self.kernels[name], self.places[name]
        freed = {read for read in kernel.reads if self._dies_by(read, self.places, place)}
        return self.graph.bytes_of(freed) - self.graph.bytes_of(kernel.writes) > self.small_bytes

    def _dies_by(self, name: str, places: Mapping[str, int], place: int) -> bool:
        """True if the buffer dies with its last reader and no later node reads it; Inductor's last reader is asked first."""
        return not self.graph.outlives(name) and all(places[r] <= place for r in reversed(self.graph.readers[name]))

    def _peak_bytes(self, nodes: Sequence[Any], begin: int) -> int:
        """Peak bytes while these nodes run from place `begin` on, above the bytes in use before the first of them."""
        order = {node.get_name(): begin + k for k, node in enumerate(nodes)}
        places = ChainMap(order, self.places)
        by_kernel = {self.kernels[name]: place for name, place in order.items()}
        return self.graph.peak_bytes(
            by_kernel,
            lambda kernel: kernel.writes,
            lambda kernel: {name for name in kernel.reads if self._dies_by(name, places, by_kernel[kernel])},
        )


def _rank(node: Any, ranks: Mapping[Any, int]) -> int:
    """Rank in the plan of the FX node that a scheduler node computes, -1 if unknown; a copy has the rank of its reader.

    On GPUs, and in C++ before 2.13, the copy that gives a convolution's incoming gradient the convolution's layout also computes
    the gradient: Inductor names the convolution as the copy's origin, or no origin, and lists the computed nodes in its `origins`.
    """
    made = node.node
    if made is None:
        return -1
    origin = made.origin_node
    found = [each for each in made.origins if each in ranks]
    computed = [each for each in found if _target(each) is not CONVOLUTION_BACKWARD]
    if origin in ranks and _target(origin) is not CONVOLUTION_BACKWARD:
        return ranks[origin]
    if computed and not node.is_extern() and (torch_version() < (2, 13) or made.get_device().type != "cpu"):
        found = computed
    elif origin in ranks:
        return ranks[origin]
    return max((ranks[each] for each in found), default=-1)


def _target(node: Any) -> object:
    return getattr(node, "target", None)
