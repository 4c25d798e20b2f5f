"""Decides which kernels Inductor may fuse under a plan: a fusion must not raise the graph's peak.

Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15.  A fusion moves one kernel to the position of the other: the
outputs of the moved kernel live longer, and the inputs of the other kernel no longer die before these outputs are written.

There are two passes over the kernels.  In the first, a fusion must not raise the memory in use between the two positions.  The
peak of the kernels that result is the limit of the second pass, in which Inductor fuses again: there a fusion may raise the memory
around it, and kernels in between may have to wait for the fused kernel, up to that limit.  So the graph has the peak of the first
pass, and no kernels more than its memory asks for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from compile_remat._torch.version import private_name
from compile_remat.inductor.scheduler_graph import Kernel, SchedulerGraph

if TYPE_CHECKING:
    from torch._inductor.choices import InductorChoices
else:
    InductorChoices = private_name("torch._inductor.choices", "InductorChoices")
V = private_name("torch._inductor.virtualized", "V")

PULLED_SHARE = 8
"""A fusion may move a write over an unfused kernel if it has at most 1/8 of the shared inputs' bytes: a bias gradient's sum."""

SMALL_SHARE = 16
"""A rise is ignored if it is at most 1/16 of the bytes of the buffers that the kernels share: a bias gradient's sum, say."""

DEPTH = 50
"""Longest chain of fused kernels, each of which waits for the next, that is followed."""


class GuardedChoices(InductorChoices):
    """Inductor's choices, without fusions that raise the peak around them.

    Inductor fuses kernels that read the same tensor and runs both at the position of the earlier one.  Across recomputed
    segments such fusions undo the plan: twelve values recomputed just in time took 13.0 MiB instead of 3.2.  Even if the last
    kernel of one segment and the first of the next are neighbours, the former frees memory that the latter needs.
    """

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Returns Inductor's answer, but False if memory would rise or a large write would move ahead of an unfused kernel."""
        if not InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            return False
        order = _order_of(scheduler)
        if order.limit_bytes is None and order.pulls_over_extern(scheduler, node1, node2):
            order.has_refused = True
            return False
        return order.allows(scheduler.name_to_fused_node, node1, node2)

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Returns Inductor's answer for a kernel and its reader, but False if memory would rise."""
        if not InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            return False
        return _order_of(scheduler).allows(scheduler.name_to_fused_node, node1, node2)


def fuse_up_to_peak(nodes: list[Any]) -> list[Any]:
    """Returns the fused kernels of a scheduler, with more of them fused as long as the graph's peak stays what it is.

    Args:
        nodes: The scheduler's nodes once Inductor has fused what the first pass allows.
    """
    if not nodes or (order := _orders.get(nodes[0].scheduler)) is None or not order.has_refused:
        return nodes
    scheduler = nodes[0].scheduler
    order.limit_bytes = order.levels(scheduler.name_to_fused_node).peak_bytes
    fused: list[Any] = scheduler.fuse_nodes(nodes)
    return fused


class PlannedOrder:
    """The kernels of one graph in the plan's order, before any fusion.

    Args:
        returned: Names of the buffers that the graph returns.

    Attributes:
        has_refused: True once a fusion was refused in the first pass.
        limit_bytes: The graph's peak after the first pass; None during it.
    """

    def __init__(self, scheduler: Any, returned: Iterable[str]) -> None:
        self.nodes = [part for node in scheduler.nodes for part in node.get_nodes()]
        self.graph = SchedulerGraph(self.nodes, scheduler.dep_size_hint, returned)
        self.by_name = {node.get_name(): node for node in self.nodes}
        self.orders = [node.min_order for node in self.nodes]
        self.kernels = WeakKeyDictionary[Any, Kernel]()
        self.has_refused = False
        self.limit_bytes: int | None = None
        self._levels: tuple[int, Levels] | None = None

    def allows(self, joined: Mapping[str, Any], first: Any, second: Any) -> bool:
        """Returns whether two kernels may be fused: see the module's two passes.

        Args:
            joined: The fused node that each scheduler node is part of at present, by the node's name.
        """
        if self.keeps_memory(joined, first, second):
            return True
        self.has_refused = True
        return False

    def levels(self, joined: Mapping[str, Any]) -> Levels:
        """The bytes in use along all present kernels; computed anew once kernels were fused."""
        num_kernels = len({id(joined.get(name) or node) for name, node in self.by_name.items()})
        if self._levels is None or self._levels[0] != num_kernels:
            self._levels = num_kernels, KernelGrouping(self, joined).levels()
        return self._levels[1]

    def keeps_memory(self, joined: Mapping[str, Any], first: Any, second: Any) -> bool:
        """Returns whether a fusion keeps the peak at both kernels' positions and in between, but for a rise within `SMALL_SHARE`.

        In the second pass the memory there may rise up to `limit_bytes`.
        """
        apart = KernelGrouping(self, joined)
        a, b = self.kernel(first), self.kernel(second)
        both = Kernel.of([*first.get_nodes(), *second.get_nodes()])
        together = KernelGrouping(self, joined, both)
        begin, end = both.first, max(together.place(both), apart.place(a), apart.place(b))
        window = slice(bisect_left(self.orders, begin), bisect_right(self.orders, end))
        nearby = {apart.kernel(node.get_name()) for node in self.nodes[window]} - {a, b}
        between = [k for k in nearby if begin <= apart.place(k) <= end]
        if any(apart.place(k) <= together.place(both) for k in between if k.reads & both.writes):
            # Kernels in between have to wait as well, so that the order of the whole graph changes.
            return self.limit_bytes is not None and self.levels(joined).allow(together.levels())
        peak_bytes = together.peak_bytes([*between, both])
        if self.limit_bytes is not None:
            return self.levels(joined).before([*between, a, b]) + peak_bytes <= self.limit_bytes
        rise_bytes = peak_bytes - apart.peak_bytes([*between, a, b])
        shared = (a.reads | a.writes) & (b.reads | b.writes)
        return rise_bytes * SMALL_SHARE <= self.graph.bytes_of(shared)

    def pulls_over_extern(self, scheduler: Any, node1: Any, node2: Any) -> bool:
        """Returns whether a fusion moves a large write, or one whose inputs are not ready, ahead of unfused kernels.

        Later fusions may change the position of the fused kernel, and the plan had a reason for its order.
        """
        first, second = (node1, node2) if node1.min_order <= node2.min_order else (node2, node1)
        if not self.graph.has_extern_between(first.min_order, second.max_order):
            return False
        written_bytes = sum(int(scheduler.dep_size_hint(dep)) for dep in second.read_writes.writes)
        shared = first.read_writes.reads & second.read_writes.reads
        is_small = written_bytes * PULLED_SHARE <= sum(int(scheduler.dep_size_hint(dep)) for dep in shared)
        return not (is_small and _is_ready(scheduler, second, first))

    def kernel(self, node: Any) -> Kernel:
        """The `Kernel` of a scheduler node, made once: a fused node is a new node."""
        known = self.kernels.get(node)
        if known is None:
            known = self.kernels[node] = Kernel.of(node.get_nodes())
        return known


@dataclass(frozen=True)
class Levels:
    """Bytes in use along the kernels of a graph, above those in use before the first of them.

    Attributes:
        bytes_before: For each kernel, in execution order, the bytes in use before it runs.
        peaks: For each kernel, the bytes in use while it runs.
    """

    bytes_before: Mapping[Kernel, int]
    peaks: Mapping[Kernel, int]

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use while a kernel runs."""
        return max(self.peaks.values())

    @cached_property
    def limits(self) -> Mapping[str, int]:
        """For each scheduler node, the most bytes in use while its kernel or one before it runs."""
        highest_bytes, found = 0, dict[str, int]()
        for kernel, peak_bytes in self.peaks.items():
            highest_bytes = max(highest_bytes, peak_bytes)
            found |= dict.fromkeys(kernel.nodes, highest_bytes)
        return found

    def allow(self, other: Levels) -> bool:
        """Returns whether each kernel of another order takes no more than `limits` says for its nodes.

        Bytes that are in use at the start and that nothing here is known to free, such as copies of weights, may die on the way:
        then earlier kernels take more, compared with later ones, than these levels say.
        """
        return all(nbytes <= min(self.limits[name] for name in kernel.nodes) for kernel, nbytes in other.peaks.items())

    def before(self, kernels: Iterable[Kernel]) -> int:
        """The bytes in use before the first of `kernels`."""
        wanted = set(kernels)
        return next(nbytes for kernel, nbytes in self.bytes_before.items() if kernel in wanted)


class KernelGrouping:
    """The scheduler's kernels at present, with `trial` in place of the kernels that it fuses."""

    def __init__(self, order: PlannedOrder, joined: Mapping[str, Any], trial: Kernel | None = None) -> None:
        self.order, self.joined, self.trial = order, joined, trial
        self.places: dict[Kernel, int] = {}

    def kernel(self, name: str) -> Kernel:
        """The kernel that a scheduler node is part of."""
        trial = self.trial
        if trial is not None and name in trial.nodes:
            return trial
        return self.order.kernel(self.joined.get(name) or self.order.by_name[name])

    def place(self, kernel: Kernel, depth: int = 0) -> int:
        """The position at which a kernel runs: that of its first node, or of the last maker of its inputs if that is later."""
        if kernel.first == kernel.last or depth == DEPTH:
            return kernel.last
        known = self.places.get(kernel)
        if known is None:
            self.places[kernel] = kernel.last  # if two wait for each other, Inductor will not join them
            makers = {self.kernel(self.maker[name]) for name in kernel.reads if name in self.maker}
            awaited = [self.place(maker, depth + 1) for maker in makers if maker.last > kernel.first]
            known = self.places[kernel] = max([kernel.first, *awaited])
        return known

    @property
    def maker(self) -> Mapping[str, str]:
        """For each buffer, the node that writes it."""
        return self.order.graph.maker

    def peak_bytes(self, kernels: Sequence[Kernel]) -> int:
        """Peak bytes while `kernels` run, above the bytes in use before the first of them."""
        return max(0, *(peak_bytes for _, _, peak_bytes in self._levels_of(kernels)))

    def levels(self) -> Levels:
        """The bytes in use along all kernels."""
        kernels = dict.fromkeys(self.kernel(node.get_name()) for node in self.order.nodes)
        found = list(self._levels_of(list(kernels)))
        before = {kernel: before_bytes for kernel, before_bytes, _ in found}
        return Levels(before, {kernel: peak_bytes for kernel, _, peak_bytes in found})

    def _levels_of(self, kernels: Sequence[Kernel]) -> Iterator[tuple[Kernel, int, int]]:
        """Yields each kernel in order, with the bytes before it and while it runs, above those before the first of them."""
        ordered = self.in_order(kernels)
        positions = {kernel: position for position, kernel in enumerate(ordered)}
        begin = min(kernel.first for kernel in ordered)
        return self.order.graph.levels(
            ordered,
            lambda kernel: {name for name in kernel.writes if not self._stays_inside(name, kernel)},
            lambda kernel: {name for name in kernel.reads if self._dies_in(name, kernel, positions, begin)},
        )

    def in_order(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """The kernels in the order of Inductor's ``topological_sort_schedule``: by first nodes, each after its inputs' makers.

        A kernel that waits pulls all kernels that it waits for to its own position, and the kernels in between come after it.
        """
        wanted = set(kernels)
        ordered: list[Kernel] = []
        seen = set[Kernel]()
        for first in sorted(kernels, key=lambda kernel: (kernel.first, kernel.last)):
            pending = [(first, False)]
            while pending:
                kernel, is_ready = pending.pop()
                if is_ready:
                    ordered.append(kernel)
                elif kernel not in seen:
                    seen.add(kernel)
                    makers = [self.kernel(self.maker[n]) for n in sorted(kernel.reads) if n in self.maker]
                    pending.append((kernel, True))
                    pending += [(maker, False) for maker in reversed(makers) if maker in wanted]
        return ordered

    def _stays_inside(self, name: str, kernel: Kernel) -> bool:
        """Returns whether a buffer is never written to memory, as only the kernel that makes it reads it."""
        graph = self.order.graph
        readers = graph.readers.get(name, ())
        return name not in graph.returned and bool(readers) and all(reader in kernel.nodes for reader in readers)

    def _dies_in(self, name: str, kernel: Kernel, positions: Mapping[Kernel, int], begin: int) -> bool:
        """Returns whether `kernel` is the last reader of a buffer, in the order of `positions`, which starts at place `begin`.

        The last reader in the plan's order is compared first: this reader decides nearly always, however many readers there are.
        """
        graph = self.order.graph
        if graph.outlives(name):
            return False
        for node in reversed(graph.readers.get(name, ())):
            reader = self.kernel(node)
            if reader is kernel:
                continue
            if not (positions[reader] < positions[kernel] if reader in positions else self.place(reader) < begin):
                return False
        return True


_orders = WeakKeyDictionary[Any, PlannedOrder]()


def _order_of(scheduler: Any) -> PlannedOrder:
    """The `PlannedOrder` of a scheduler, read once, when the first two kernels are compared."""
    order = _orders.get(scheduler)
    if order is None:
        order = _orders[scheduler] = PlannedOrder(scheduler, V.graph.get_output_names())
    return order


def _is_ready(scheduler: Any, node: Any, place: Any) -> bool:
    """Returns whether all inputs of `node` exist when `place` runs; otherwise the fused kernel would run later than `place`."""
    for dep in node.read_writes.reads:
        buffer = scheduler.name_to_buf.get(dep.name)
        if buffer is not None and buffer.defining_op is not None and buffer.defining_op.max_order > place.min_order:
            return False
    return True
