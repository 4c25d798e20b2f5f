"""Which kernels Inductor may join under a plan: those that do not raise the memory in use between where they stood.

Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15.  Joining two kernels moves one of them to where the other
stands: what it writes then lives longer, and what the other reads no longer dies before that is written.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
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
"""A write may be pulled over an unfused kernel when it is smaller than what both read by this factor: a bias gradient's sum."""

SMALL_SHARE = 16
"""A rise counts as none when it is smaller than what the kernels share by this factor: a bias gradient's sum, say."""

DEPTH = 50
"""Joined kernels that wait for joined kernels are followed so far."""


class GuardedChoices(InductorChoices):
    """Inductor's choices, without fusions that raise the peak around them.

    Inductor joins kernels that read the same tensor and runs both where the earlier one stood.  Across rematerialised
    segments that undoes the plan: twelve values recomputed just in time took 13.0 MiB instead of 3.2.  The last kernel
    of one segment and the first of the next are neighbours, and even there the one frees what the other needs.
    """

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Inductor's answer, and no where memory would rise, or a large write would be pulled over an unfused kernel."""
        if not InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            return False
        order = _order_of(scheduler)
        if order.pulls_over_extern(scheduler, node1, node2):
            return False
        return order.keeps_memory(scheduler.name_to_fused_node, node1, node2)

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """The same where the second reads what the first makes."""
        if not InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            return False
        return _order_of(scheduler).keeps_memory(scheduler.name_to_fused_node, node1, node2)


class PlannedOrder:
    """The kernels of one graph as the plan ordered them, before any were joined.

    Args:
        returned: Names of the buffers that the graph returns.
    """

    def __init__(self, scheduler: Any, returned: Iterable[str]) -> None:
        self.nodes = [part for node in scheduler.nodes for part in node.get_nodes()]
        self.graph = SchedulerGraph(self.nodes, scheduler.dep_size_hint, returned)
        self.by_name = {node.get_name(): node for node in self.nodes}
        self.orders = [node.min_order for node in self.nodes]
        self.kernels = WeakKeyDictionary[Any, Kernel]()

    def keeps_memory(self, joined: Mapping[str, Any], first: Any, second: Any) -> bool:
        """Whether no more is in use where they run, and in between, when the two become one kernel.

        Args:
            joined: What each node of the scheduler is part of at present.
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
            return False  # what is between would have to wait as well
        rise_bytes = together.peak_bytes([*between, both]) - apart.peak_bytes([*between, a, b])
        shared = (a.reads | a.writes) & (b.reads | b.writes)
        return rise_bytes * SMALL_SHARE <= self.graph.bytes_of(shared)

    def pulls_over_extern(self, scheduler: Any, node1: Any, node2: Any) -> bool:
        """Whether a sibling would write much before the unfused kernels that it stood behind.

        What later fusions make of the place is not known yet, and the plan had a reason to put it there.
        """
        first, second = (node1, node2) if node1.min_order <= node2.min_order else (node2, node1)
        if not self.graph.has_extern_between(first.min_order, second.max_order):
            return False
        written_bytes = sum(int(scheduler.dep_size_hint(dep)) for dep in second.read_writes.writes)
        shared = first.read_writes.reads & second.read_writes.reads
        is_small = written_bytes * PULLED_SHARE <= sum(int(scheduler.dep_size_hint(dep)) for dep in shared)
        return not (is_small and _is_ready(scheduler, second, first))

    def kernel(self, node: Any) -> Kernel:
        """What a node of the scheduler is; joined ones are new nodes."""
        known = self.kernels.get(node)
        if known is None:
            known = self.kernels[node] = Kernel.of(node.get_nodes())
        return known


class KernelGrouping:
    """Which kernels there are: those of the scheduler at present, with `trial` in the place of what it joins."""

    def __init__(self, order: PlannedOrder, joined: Mapping[str, Any], trial: Kernel | None = None) -> None:
        self.order, self.joined, self.trial = order, joined, trial
        self.places: dict[Kernel, int] = {}

    def kernel(self, name: str) -> Kernel:
        """The kernel that a node of the scheduler is part of."""
        trial = self.trial
        if trial is not None and name in trial.nodes:
            return trial
        return self.order.kernel(self.joined.get(name) or self.order.by_name[name])

    def place(self, kernel: Kernel, depth: int = 0) -> int:
        """Where it runs: where its first node stood, or as late as the last of what it reads is made."""
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
        """The most in use while `kernels` run, above what was when the first of them began."""
        ordered = self.in_order(kernels)
        positions = {kernel: position for position, kernel in enumerate(ordered)}
        begin = min(kernel.first for kernel in ordered)
        return self.order.graph.peak_bytes(
            ordered,
            lambda kernel: {name for name in kernel.writes if not self._stays_inside(name, kernel)},
            lambda kernel: {name for name in kernel.reads if self._dies_in(name, kernel, positions, begin)},
        )

    def in_order(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """The kernels as Inductor's ``topological_sort_schedule`` runs them: by their first nodes, each behind what it reads.

        A kernel that waits pulls all that it waits for to its own place, and what stood between comes after it.
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
        """Whether a buffer is never written: the one kernel that makes it is all that reads it."""
        graph = self.order.graph
        readers = graph.readers.get(name, ())
        return name not in graph.returned and bool(readers) and all(reader in kernel.nodes for reader in readers)

    def _dies_in(self, name: str, kernel: Kernel, positions: Mapping[Kernel, int], begin: int) -> bool:
        """Whether `kernel` is the last that reads it, in the order that `positions` tells of and that starts at `begin`.

        The last reader in the plan's order is asked first: it decides nearly always, however many there are.
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
    """What the guard knows of a scheduler, read once, when the first two kernels are compared."""
    order = _orders.get(scheduler)
    if order is None:
        order = _orders[scheduler] = PlannedOrder(scheduler, V.graph.get_output_names())
    return order


def _is_ready(scheduler: Any, node: Any, place: Any) -> bool:
    """Whether all that `node` reads exists where `place` stands; else the fused kernel would run later than `place`."""
    for dep in node.read_writes.reads:
        buffer = scheduler.name_to_buf.get(dep.name)
        if buffer is not None and buffer.defining_op is not None and buffer.defining_op.max_order > place.min_order:
            return False
    return True
