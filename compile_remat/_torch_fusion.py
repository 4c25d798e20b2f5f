"""Which kernels Inductor may make one of.  Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15.

Imports nothing of ours but `_torch_version`.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from compile_remat._torch_version import private_name

if TYPE_CHECKING:
    from torch._inductor.choices import InductorChoices
else:
    InductorChoices = private_name("torch._inductor.choices", "InductorChoices")
V = private_name("torch._inductor.virtualized", "V")

SMALL_SHARE = 8
"""A node may be pulled forward when what it writes is smaller than what both read by this factor."""


class GuardedChoices(InductorChoices):
    """Inductor's choices, without fusions that make a buffer long before it is read.

    Sibling fusion joins kernels that read the same tensor and runs both where the earlier one stood.  Across
    rematerialised segments that undoes the plan: twelve values recomputed just in time took 13.0 MiB instead of 3.2.
    Between neighbours it costs nothing, so only siblings with an unfused kernel (matmul, convolution, attention)
    between them are kept apart, unless the later one writes little (a bias gradient's sum).  So are a kernel and one that
    reads what it writes, where that is read later anyway, and siblings side by side where what the earlier one reads for
    the last time would live on beside what the later one writes.
    """

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Inductor's answer, and no when the fusion would pull a large write over an unfused kernel."""
        if not InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            return False
        return not _pulls_over_extern(scheduler, node1, node2) and not _holds_both(scheduler, node1, node2)

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Inductor's answer, and no when the fusion would pull a large write over an unfused kernel for nothing."""
        if not InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score):
            return False
        handed = _read_names(node2) & {dep.name for dep in node1.read_writes.writes}
        live_on = handed and all(_last_order(scheduler, name) > node2.max_order for name in handed)
        return not (live_on and _pulls_over_extern(scheduler, node1, node2))


@functools.cache
def free_after_each_kernel() -> None:
    """Let Inductor's C++ backend call each kernel on its own wherever `GuardedChoices` are in force; there is no undoing it.

    By itself it makes one function of all kernels up to the next unfused one, whose outputs are then all allocated before
    and whose inputs are all freed after it.
    """
    scheduling = private_name("torch._inductor.codegen.cpp", "CppScheduling")
    original = scheduling.ready_to_flush

    @functools.wraps(original)
    def ready_to_flush(self: Any) -> Any:
        return original(self) or (
            isinstance(V.choices, GuardedChoices) and bool(V.graph.scheduler.buffer_names_to_free)
        )

    scheduling.ready_to_flush = ready_to_flush


def _read_names(node: Any) -> set[str]:
    return {dep.name for dep in node.read_writes.reads}


def _last_order(scheduler: Any, name: str) -> int:
    """Where the last kernel stands that reads a buffer; beyond all for one that is returned, or is an input."""
    buffer = scheduler.name_to_buf.get(name)
    orders = [getattr(user.node, "max_order", sys.maxsize) for user in buffer.users] if buffer is not None else []
    return max(orders, default=sys.maxsize)


def _holds_both(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Whether one kernel for both would hold much that two, one after the other, would not hold at once."""
    first, second = (node1, node2) if node1.min_order <= node2.min_order else (node2, node1)
    if not _is_ready(scheduler, second, first):
        return False  # the later one stays where it is
    shared = _read_names(first) & _read_names(second)
    sizes = {dep.name: _nbytes(scheduler, dep) for dep in (*first.read_writes.reads, *second.read_writes.reads)}
    lost = [n for n in _read_names(first) - shared if _last_order(scheduler, n) <= first.max_order]
    dying = Counter(sizes[name] for name in lost)
    dying -= Counter(_nbytes(scheduler, dep) for dep in first.read_writes.writes)  # written over
    written = Counter(_nbytes(scheduler, dep) for dep in second.read_writes.writes)
    dying, written = dying - written, written - dying
    held = min(sum(nbytes * count for nbytes, count in sizes_of.items()) for sizes_of in (dying, written))
    return held * SMALL_SHARE > sum(sizes[name] for name in shared)


def _pulls_over_extern(scheduler: Any, node1: Any, node2: Any) -> bool:
    first, second = (node1, node2) if node1.min_order <= node2.min_order else (node2, node1)
    low, high = first.min_order, second.max_order
    if not any(node.is_extern() and low < node.min_order < high for node in scheduler.nodes):
        return False
    written = sum(_nbytes(scheduler, dep) for dep in second.read_writes.writes)
    shared = first.read_writes.reads & second.read_writes.reads
    is_small = written * SMALL_SHARE <= sum(_nbytes(scheduler, dep) for dep in shared)
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
