"""Inductor's kernels in the plan's order: in a backward, a kernel that Inductor puts off goes back to where it frees memory.

Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15 but for the class of passes.
Inductor writes a pointwise value where something first needs it written, and what the value is computed from stays alive until
then.  A convolution's backward needs its incoming gradient and its input, which the plan recomputes just before it: the gradient's
kernel came behind the recomputed segment, a fifth more at the peak (``pytest tests/inductor/test_kernel_order.py``).  A
physics-informed net took 67.9 MB in place of 57.3 (``python -m benchmarks.zoo --model pinn_burgers``).

Where it calls ATen's kernel for a scatter, it writes what that starts from (zeros) before it computes what is scattered: the zeros
lay beside all that this reads.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from compile_remat._torch.version import private_name, torch_version
from compile_remat.inductor.scheduler_graph import Kernel, SchedulerGraph

V = private_name("torch._inductor.virtualized", "V")
InvokeSubgraph = private_name("torch._inductor.ir", "InvokeSubgraph")
NonOwningLayout = private_name("torch._inductor.ir", "NonOwningLayout")
SCATTERS: tuple[type, ...] = tuple(
    private_name("torch._inductor.ir", name) for name in ("ScatterFallback", "IndexPutFallback")
)
"""Calls of ATen's kernels that write elements into their first operand, in place."""

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default

SMALL_PART = 256
"""A kernel that frees no more than this part of the largest buffer stays where it is."""


def move_kernels(nodes: list[Any]) -> list[Any]:
    """The nodes of a scheduler, before any are joined, in their new order; the same list where none moves.

    Forwards keep Inductor's order, which the planner knows, but for what calls of a region are joined to, and for scatters.
    """
    nodes, graph = join_at_once(nodes), V.graph.module.graph
    if any(isinstance(node.node, SCATTERS) for node in nodes):
        sequence = KernelSequence(nodes, V.graph.get_output_names(), graph.nodes)
        nodes = sequence.nodes if sequence.move_starts_down() else nodes
    if not V.graph.is_backward or not nodes:
        return nodes
    sequence = KernelSequence(nodes, V.graph.get_output_names(), graph.nodes)
    return sequence.nodes if sequence.move_up() else nodes


def join_at_once(nodes: list[Any]) -> list[Any]:
    """The nodes of a scheduler with each copy into a concatenation right behind what it copies; the same list where none moves.

    Inductor puts the copies where the concatenation stands: what all calls of a region gave lived beside what it was joined to.
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
    """Nodes of a scheduler in an order, and what is alive along them.

    Args:
        nodes: The scheduler's, in a topological order.
        returned: Names of the buffers that the graph returns.
        planned: The nodes of the graph that they were made from, in the plan's order.
    """

    def __init__(self, nodes: Sequence[Any], returned: Iterable[str], planned: Iterable[Any]) -> None:
        self.nodes = list(nodes)
        self.graph = SchedulerGraph(nodes, nodes[0].scheduler.dep_size_hint, returned)
        ranks = {node: rank for rank, node in enumerate(planned)}
        self.ranks = {node.get_name(): _rank(node, ranks) for node in nodes}
        self.along = FirstAbove([self.ranks[node.get_name()] for node in nodes])
        self.places = {node.get_name(): place for place, node in enumerate(nodes)}
        self.kernels = {node.get_name(): Kernel.of(node.get_nodes()) for node in nodes}
        self.small_bytes = max(self.graph.nbytes.values(), default=0) // SMALL_PART

    def move_up(self) -> int:
        """Move kernels that free more than they make to their places in the plan.

        None goes where more would be in use then.

        Returns:
            How many were moved.
        """
        moved = 0
        for node in list(self.nodes):
            name = node.get_name()
            if node.is_extern() or node.is_template() or not self._shrinks(name):
                continue
            end = self.places[name]
            begin = max((self.places[maker] for maker in self._awaited(node)), default=-1) + 1
            begin = self.along.first(begin, end, self.ranks[name])
            if begin == end:
                continue
            before = self.nodes[begin : end + 1]
            after = [node, *before[:-1]]
            if self._peak_bytes(after, begin) <= self._peak_bytes(before, begin):
                self._put(after, begin)
                moved += 1
        return moved

    def move_starts_down(self) -> int:
        """Move the kernel that writes what a scatter starts from to right before the scatter.

        None goes where more would be in use then.

        Returns:
            How many were moved.
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
        """Inductor's own kernels among those that make what a scatter writes into."""
        written = [name for buffer in scatter.get_outputs() for name in buffer.get_mutations()]
        makers = [self.graph.maker[name] for name in written if name in self.graph.maker]
        return [maker for maker in makers if self.kernels[maker].accesses]

    def _put(self, nodes: Sequence[Any], begin: int) -> None:
        for place, node in enumerate(nodes, begin):
            self.nodes[place] = node
            self.places[node.get_name()] = place
            self.along.put(place, self.ranks[node.get_name()])

    def _readers_of(self, name: str) -> set[str]:
        """The nodes that read what a node writes."""
        return {reader for made in self.kernels[name].writes for reader in self.graph.readers.get(made, ())}

    def _awaited(self, node: Any) -> list[str]:
        """The nodes that must run before this one; for one that writes in place, also who reads what was there."""
        names = {dep.name for part in node.get_nodes() for dep in part.unmet_dependencies}
        makers = [self.graph.maker[name] for name in names if name in self.graph.maker]
        return [maker for maker in makers if maker != node.get_name()]

    def _shrinks(self, name: str) -> bool:
        """Whether less is in use after the node than before it, and not by some sum of a bias' gradient."""
        kernel, place = self.kernels[name], self.places[name]
        freed = {read for read in kernel.reads if self._dies_by(read, self.places, place)}
        return self.graph.bytes_of(freed) - self.graph.bytes_of(kernel.writes) > self.small_bytes

    def _dies_by(self, name: str, places: Mapping[str, int], place: int) -> bool:
        """Whether nothing reads it behind the place; the reader that Inductor had last is asked first."""
        return not self.graph.outlives(name) and all(places[r] <= place for r in reversed(self.graph.readers[name]))

    def _peak_bytes(self, nodes: Sequence[Any], begin: int) -> int:
        """The most in use while these run from place `begin` on, above what was when the first of them began."""
        order = {node.get_name(): begin + k for k, node in enumerate(nodes)}
        places = ChainMap(order, self.places)
        by_kernel = {self.kernels[name]: place for name, place in order.items()}
        return self.graph.peak_bytes(
            by_kernel,
            lambda kernel: kernel.writes,
            lambda kernel: {name for name in kernel.reads if self._dies_by(name, places, by_kernel[kernel])},
        )


class FirstAbove:
    """A list of ints that finds the first one above a bound in a range, in a number of steps that grows as the logarithm.

    A complete binary tree in an array: node `k` holds the largest of its children `2 k` and `2 k + 1`.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self.size = 1 << max(1, len(values)).bit_length()
        self.most = [-1] * self.size + list(values) + [-1] * (self.size - len(values))
        for k in reversed(range(1, self.size)):
            self.most[k] = max(self.most[2 * k], self.most[2 * k + 1])

    def put(self, place: int, value: int) -> None:
        """Replace the value at a place."""
        k = place + self.size
        self.most[k] = value
        while k > 1:
            k //= 2
            self.most[k] = max(self.most[2 * k], self.most[2 * k + 1])

    def first(self, begin: int, end: int, bound: int) -> int:
        """The first place of ``range(begin, end)`` whose value is above the bound; `end` where there is none."""
        k = begin + self.size
        while self.most[k] <= bound:  # to the right, by the largest trees that start there
            while k & 1:
                k //= 2
            if k == 0:
                return end
            k += 1
        while k < self.size:
            k *= 2
            k += self.most[k] <= bound
        return min(end, k - self.size)


def _rank(node: Any, ranks: Mapping[Any, int]) -> int:
    """Where the plan computes what a node of the scheduler writes; a copy belongs to what it is made for.

    On GPUs, and in C++ before 2.13, a convolution's gradient is computed by the copy that gives it the convolution's layout: then
    Inductor names the convolution as the node's origin, or no origin at all, and what is computed stands among its `origins`.
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
