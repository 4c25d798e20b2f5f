"""Prices of single nodes from the price of fused groups.

A plan's time must be a sum over its nodes, so that a cut, a linear bound and a local search can all use it.  So a fused
kernel's memory traffic is shared out: the first node of a fused group that reads a buffer pays for reading it, the node
whose result goes to memory pays for writing it, and what stays in registers costs its arithmetic alone.  Nodes
that fuse are those with equally many unfused kernels before them (`Draft.depth`).

What was written a moment ago may still lie in the device's cache: a fused kernel reads it from there if no more than
`CostModel.cache_bytes` were read and written since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_remat.cost_models import CostModel, Op
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION, Kernel


@dataclass
class Draft:
    """What a price depends on.

    Attributes:
        sources: The drafts that it reads, views seen through.
        input_reads: Names and bytes of the graph inputs that it reads.
        depth: The most unfused kernels on any path that leads to it.
        mask_factor: How many bytes' worth of time one saved byte costs: Inductor's CPU kernels do not vectorise loads
            and stores of bool, so a saved mask is no quicker to handle than floats (it does take a quarter of the memory).
    """

    op: Op
    kernel: Kernel
    nbytes: int
    sources: tuple[Draft, ...]
    input_reads: tuple[tuple[str, int], ...]
    in_forward: bool
    in_backward: bool
    depth: int = 0
    realised: bool = False
    is_output: bool = False
    time_ns: int = 0
    save_time_ns: int = 0
    mask_factor: int = 1


def price(values: Sequence[Draft], steps: Sequence[Draft], cost: CostModel) -> int:
    """Set `time_ns` of all and `save_time_ns` of the values; returns the time of a step that recomputes nothing."""
    forward_stored, backward_stored = _stored_sets(values, steps)
    reads = _Reads(forward_stored | backward_stored, cost.cache_bytes)
    once_more: dict[int, int] = {}
    for draft in (*values, *steps):
        work = reads.of(draft, cost)
        is_stored = id(draft) in (forward_stored if draft.in_forward else backward_stored)
        draft.time_ns = _time(draft, work, is_stored, cost)
        once_more[id(draft)] = _time(draft, work, id(draft) in backward_stored, cost)
    step_time_ns = sum(d.time_ns for d in (*values, *steps))
    for draft in values:
        draft.time_ns = once_more[id(draft)]  # what is a buffer in the forward may stay in registers in the backward
        draft.save_time_ns = _save_time(draft, forward_stored, backward_stored, cost)
    return step_time_ns


def _stored_sets(values: Sequence[Draft], steps: Sequence[Draft]) -> tuple[set[int], set[int]]:
    """Nodes with a buffer in the forward, and those with one when the backward computes them."""
    forward = {id(d) for d in values if d.kernel != POINTWISE or d.realised or d.is_output}
    backward = {
        id(d) for d in (*values, *steps) if d.kernel != POINTWISE or d.realised or (d.in_backward and d.is_output)
    }
    for draft in values:
        if draft.kernel == EXTERN:
            forward.update(id(s) for s in draft.sources)
    for draft in steps:
        if draft.kernel == EXTERN:
            backward.update(id(s) for s in draft.sources)
    return forward, backward


@dataclass(frozen=True)
class _Work:
    """A fused node's arithmetic in ns, the bytes that it is the first of its group to read, those of them in the cache."""

    arithmetic_ns: int = 0
    read_bytes: int = 0
    cached_bytes: int = 0


class _Reads:
    """What fused groups read, node by node in the order in which they run."""

    def __init__(self, buffers: set[int], cache_bytes: int) -> None:
        self.buffers, self.cache_bytes = buffers, cache_bytes
        self.seen: set[tuple[int | str, int]] = set()
        self.moved_bytes = 0
        self.written_at: dict[int, int] = {}

    def of(self, draft: Draft, cost: CostModel) -> _Work:
        """The work of the next node."""
        work = self._work(draft, cost) if draft.kernel in (POINTWISE, REDUCTION) else _Work()
        if draft.kernel == EXTERN:
            self.moved_bytes += draft.op.read_bytes + draft.op.write_bytes
        self.moved_bytes += work.read_bytes
        if id(draft) in self.buffers:
            self.moved_bytes += 0 if draft.kernel == EXTERN else draft.nbytes
            self.written_at[id(draft)] = self.moved_bytes
        return work

    def _work(self, draft: Draft, cost: CostModel) -> _Work:
        read_bytes = cached_bytes = 0
        for source in draft.sources:
            key = (id(source), draft.depth)
            if id(source) in self.buffers and key not in self.seen:
                self.seen.add(key)
                read_bytes += source.nbytes
                cached_bytes += source.nbytes if self._is_cached(source) else 0
        for name, nbytes in draft.input_reads:
            if (name, draft.depth) not in self.seen:
                self.seen.add((name, draft.depth))
                read_bytes += nbytes
        return _Work(cost.arithmetic_time_ns(draft.op), read_bytes, cached_bytes)

    def _is_cached(self, source: Draft) -> bool:
        written_at = self.written_at.get(id(source))
        return written_at is not None and self.moved_bytes - written_at + source.nbytes <= self.cache_bytes


def _time(draft: Draft, work: _Work, is_stored: bool, cost: CostModel) -> int:
    """The node's share: a kernel of its own, or arithmetic against traffic, and a launch if it ends in a buffer."""
    if draft.kernel == EXTERN:
        return cost.op_time_ns(draft.op)
    if draft.kernel not in (POINTWISE, REDUCTION):
        return 0
    traffic_ns = cost.traffic_time_ns(work.read_bytes + (draft.nbytes if is_stored else 0), work.cached_bytes)
    return (cost.launch_time_ns if is_stored else 0) + max(work.arithmetic_ns, traffic_ns)


def _save_time(draft: Draft, forward_stored: set[int], backward_stored: set[int], cost: CostModel) -> int:
    """Traffic of a saved value that recomputing would spare: its write in the forward, its read by fused readers."""
    if draft.kernel != POINTWISE:
        return 0
    traffic_ns = cost.traffic_time_ns(draft.nbytes * draft.mask_factor)
    write = 0 if id(draft) in forward_stored else traffic_ns
    read = 0 if id(draft) in backward_stored else traffic_ns
    return write + read
