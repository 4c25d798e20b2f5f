"""Which kernels Inductor may join under a plan: those that do not raise the memory in use between where they stood.

Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15.  Joining two kernels moves one of them to where the other
stands: what it writes then lives longer, and what the other reads no longer dies before that is written.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from compile_remat._torch.version import private_name

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

OF_THE_CALLER = ("primals_", "arg", "fwd_rng_state", "bwd_rng_state", "tangents")
"""How inputs are called that die with their caller and not with their last reader."""


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
        return not _pulls_over_extern(scheduler, node1, node2) and _keeps_memory(scheduler, node1, node2)

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """The same where the second reads what the first makes."""
        if not InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            return False
        return _keeps_memory(scheduler, node1, node2)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel, or several that are joined.

    Attributes:
        nodes: Names of its scheduler nodes.
        first: Where the first of them stood in the plan's order.
        last: Where the last of them stood.
        reads: Names of buffers and inputs that come from elsewhere.
        writes: Names of buffers that it makes.
        steps: What each of its nodes reads and writes, for Inductor's own: a node may write over what it is the last to read.
    """

    nodes: frozenset[str]
    first: int
    last: int
    reads: frozenset[str]
    writes: frozenset[str]
    steps: tuple[tuple[frozenset[str], frozenset[str]], ...]

    @staticmethod
    def of(nodes: Sequence[Any]) -> Kernel:
        """The kernel that runs these nodes of the scheduler."""
        steps = [
            (frozenset(d.name for d in n.read_writes.reads), frozenset(b.get_name() for b in n.get_outputs()))
            for n in nodes
        ]
        writes = frozenset().union(*(made for _, made in steps))
        reads = frozenset().union(*(read for read, _ in steps)) - writes
        orders = [node.min_order for node in nodes]
        own = () if any(node.is_extern() or node.is_template() for node in nodes) else tuple(steps)
        return Kernel(frozenset(n.get_name() for n in nodes), min(orders), max(orders), reads, writes, own)


class Order:
    """The kernels of one graph as the plan ordered them, before any were joined.

    Args:
        returned: Names of the buffers that the graph returns.
    """

    def __init__(self, scheduler: Any, returned: Iterable[str]) -> None:
        self.returned = frozenset(returned)
        self.nodes = [part for node in scheduler.nodes for part in node.get_nodes()]
        self.by_name = {node.get_name(): node for node in self.nodes}
        self.orders = [node.min_order for node in self.nodes]
        self.readers: dict[str, set[str]] = {}
        self.maker: dict[str, str] = {}
        self.nbytes: dict[str, int] = {}
        for node in self.nodes:
            self.maker.update({buffer.get_name(): node.get_name() for buffer in node.get_outputs()})
            for dep in node.read_writes.reads:
                self.readers.setdefault(dep.name, set()).add(node.get_name())
            for dep in (*node.read_writes.reads, *node.read_writes.writes):
                self.nbytes[dep.name] = max(self.nbytes.get(dep.name, 0), int(scheduler.dep_size_hint(dep)))
        self.kernels = WeakKeyDictionary[Any, Kernel]()

    def keeps_memory(self, joined: Mapping[str, Any], first: Any, second: Any) -> bool:
        """Whether no more is in use where they run, and in between, when the two become one kernel.

        Args:
            joined: What each node of the scheduler is part of at present.
        """
        apart = Moment(self, joined)
        a, b = self.kernel(first), self.kernel(second)
        both = Kernel.of([*first.get_nodes(), *second.get_nodes()])
        together = Moment(self, joined, both)
        places = [together.place(both), apart.place(a), apart.place(b)]
        begin, end = both.first, max(places)
        window = slice(bisect_left(self.orders, begin), bisect_right(self.orders, end))
        found = {apart.kernel(node.get_name()) for node in self.nodes[window]} - {a, b}
        between = [k for k in found if begin <= apart.place(k) <= end]
        if any(apart.place(k) <= together.place(both) for k in between if k.reads & both.writes):
            return False  # what is between would have to wait as well
        rise_bytes = together.peak_bytes([*between, both]) - apart.peak_bytes([*between, a, b])
        shared = (a.reads | a.writes) & (b.reads | b.writes)
        return rise_bytes * SMALL_SHARE <= sum(self.nbytes.get(name, 0) for name in shared)

    def kernel(self, node: Any) -> Kernel:
        """What a node of the scheduler is; joined ones are new nodes."""
        known = self.kernels.get(node)
        if known is None:
            known = self.kernels[node] = Kernel.of(node.get_nodes())
        return known


class Moment:
    """Which kernels there are: those of the scheduler at present, with `trial` in the place of what it joins."""

    def __init__(self, order: Order, joined: Mapping[str, Any], trial: Kernel | None = None) -> None:
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
            makers = {self.kernel(self.order.maker[name]) for name in kernel.reads if name in self.order.maker}
            late = [self.place(maker, depth + 1) for maker in makers if maker.last > kernel.first]
            known = self.places[kernel] = max([kernel.first, *late])
        return known

    def peak_bytes(self, kernels: Sequence[Kernel]) -> int:
        """The most in use while `kernels` run, above what was when the first of them began."""
        nbytes = self.order.nbytes
        level = peak = 0
        row = self.in_order(kernels)
        positions = {kernel: position for position, kernel in enumerate(row)}
        begin = min(kernel.first for kernel in row)
        for kernel in row:
            made = {name for name in kernel.writes if not self._stays_inside(name, kernel)}
            freed = {name for name in kernel.reads if self._dies_in(name, kernel, positions, begin)}
            again = reused_bytes(kernel, made, freed, nbytes)
            level += sum(nbytes.get(name, 0) for name in made) - again
            peak = max(peak, level)
            level += again - sum(nbytes.get(name, 0) for name in freed)
        return peak

    def in_order(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """The kernels as Inductor's ``topological_sort_schedule`` runs them: by their first nodes, each behind what it reads.

        So one that waits pulls all that it waits for to its own place, and what stood between comes after it.
        """
        order, wanted = self.order, set(kernels)
        row: list[Kernel] = []
        seen = set[Kernel]()
        for first in sorted(kernels, key=lambda kernel: (kernel.first, kernel.last)):
            pending = [(first, False)]
            while pending:
                kernel, is_ready = pending.pop()
                if is_ready:
                    row.append(kernel)
                elif kernel not in seen:
                    seen.add(kernel)
                    makers = [self.kernel(order.maker[n]) for n in sorted(kernel.reads) if n in order.maker]
                    pending.append((kernel, True))
                    pending += [(maker, False) for maker in reversed(makers) if maker in wanted]
        return row

    def _stays_inside(self, name: str, kernel: Kernel) -> bool:
        """Whether a buffer is never written: the one kernel that makes it is all that reads it."""
        readers = self.order.readers.get(name, set())
        return name not in self.order.returned and bool(readers) and readers <= kernel.nodes

    def _dies_in(self, name: str, kernel: Kernel, positions: Mapping[Kernel, int], begin: int) -> bool:
        """Whether `kernel` is the last that reads it, in the row that `positions` tells of and that starts at `begin`."""
        if name in self.order.returned or (name not in self.order.maker and name.startswith(OF_THE_CALLER)):
            return False
        readers = {self.kernel(reader) for reader in self.order.readers.get(name, set()) - kernel.nodes}
        return all(
            positions[reader] < positions[kernel] if reader in positions else self.place(reader) < begin
            for reader in readers - {kernel}
        )


def reused_bytes(kernel: Kernel, made: Set[str], freed: Set[str], nbytes: Mapping[str, int]) -> int:
    """What the kernel writes over what its nodes read: they are of one size, and nothing else reads it later."""
    left, total = set(freed), 0
    for place, (reads, writes) in enumerate(kernel.steps):
        last = reads.difference(*(later for later, _ in kernel.steps[place + 1 :]))
        for name in sorted(writes):
            found = next((old for old in sorted(last & left) if nbytes.get(old, 0) == nbytes.get(name, 0)), None)
            if found is not None:
                left.discard(found)
                if name in made:
                    total += nbytes.get(found, 0)
                else:
                    left.add(name)  # a value inside the kernel: what is made of it may take the same place
    return total


_orders = WeakKeyDictionary[Any, Order]()


def _keeps_memory(scheduler: Any, node1: Any, node2: Any) -> bool:
    order = _orders.get(scheduler)
    if order is None:
        order = _orders[scheduler] = Order(scheduler, V.graph.get_output_names())
    return order.keeps_memory(scheduler.name_to_fused_node, node1, node2)


def _pulls_over_extern(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Whether a sibling would write much before the unfused kernels (matmul, convolution, attention) that it stood behind.

    What later fusions make of the place is not known yet, and the plan had a reason to put it there.
    """
    first, second = (node1, node2) if node1.min_order <= node2.min_order else (node2, node1)
    low, high = first.min_order, second.max_order
    if not any(node.is_extern() and low < node.min_order < high for node in scheduler.nodes):
        return False
    written = sum(_nbytes(scheduler, dep) for dep in second.read_writes.writes)
    shared = first.read_writes.reads & second.read_writes.reads
    is_small = written * PULLED_SHARE <= sum(_nbytes(scheduler, dep) for dep in shared)
    return not (is_small and _is_ready(scheduler, second, first))


def _is_ready(scheduler: Any, node: Any, place: Any) -> bool:
    """Whether all that `node` reads exists where `place` stands; else the fused kernel would be a late `place`."""
    for dep in node.read_writes.reads:
        buffer = scheduler.name_to_buf.get(dep.name)
        if buffer is not None and buffer.defining_op is not None and buffer.defining_op.max_order > place.min_order:
            return False
    return True


def _nbytes(scheduler: Any, dep: Any) -> int:
    return int(scheduler.dep_size_hint(dep))
