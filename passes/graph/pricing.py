"""Prices of single nodes from the price of fused groups.

The time of a plan must be a sum over its nodes, so that a cut, a linear bound and a local search can all use it.  So the memory
traffic of a fused kernel is split among its nodes: the first node of a fused group that reads a buffer pays for the read, a node
whose result goes to memory pays for the write, and a node whose result stays in registers costs its arithmetic alone.
Nodes of equal `Draft.depth`, the number of unfused kernels before them, form a fused group.

A recently written buffer may still be in the device's cache: a fused kernel reads the buffer from there if no more than
`CostModel.cache_bytes` were read and written since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_remat.cost_models import CostModel
from compile_remat.passes.graph.node_drafts import Draft
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION, SCATTER


def price(values: Sequence[Draft], steps: Sequence[Draft], cost: CostModel) -> int:
    """Set `time_ns` of all drafts and `save_time_ns` of the values; returns the ns of a training step that recomputes nothing."""
    forward_buffers, backward_buffers = _nodes_with_buffers(values, steps)
    reads = _Reads(forward_buffers | backward_buffers, cost.cache_bytes)
    once_more: dict[Draft, int] = {}
    for draft in (*values, *steps):
        work = reads.of(draft, cost)
        has_buffer = draft in (forward_buffers if draft.in_forward else backward_buffers)
        draft.time_ns = _time(draft, work, has_buffer, cost)
        once_more[draft] = _time(draft, work, draft in backward_buffers, cost)
    only_if_saved = {d: _snapshot_time(d, cost) for d in values if d.is_snapshot}
    step_time_ns = sum(d.time_ns for d in (*values, *steps) if d not in only_if_saved)
    for draft in values:
        draft.time_ns = once_more[draft]  # a buffer of the forward may stay in registers in the backward
        draft.save_time_ns = _save_time(draft, forward_buffers, backward_buffers, cost)
        if draft in only_if_saved:  # a snapshot runs only if it is saved
            draft.time_ns = draft.save_time_ns = only_if_saved[draft]
    return step_time_ns


def _nodes_with_buffers(values: Sequence[Draft], steps: Sequence[Draft]) -> tuple[set[Draft], set[Draft]]:
    """Nodes that have a buffer in the forward, and nodes that have one when the backward computes them."""
    forward = {d for d in values if d.kernel != POINTWISE or d.is_materialised or d.is_output}
    backward = {
        d for d in (*values, *steps) if d.kernel != POINTWISE or d.is_materialised or (d.in_backward and d.is_output)
    }
    for draft in values:
        if draft.kernel == EXTERN:
            forward.update(draft.sources)
    for draft in steps:
        if draft.kernel == EXTERN:
            backward.update(draft.sources)
    return forward, backward


@dataclass(frozen=True)
class _Work:
    """Arithmetic of a fused node, bytes that it is the first of its group to read, and how many of these are in the cache."""

    arithmetic_ns: int = 0
    read_bytes: int = 0
    cached_bytes: int = 0


class _Reads:
    """Tracks the buffers that fused groups have read and written, node by node in execution order."""

    def __init__(self, buffers: set[Draft], cache_bytes: int) -> None:
        self.buffers, self.cache_bytes = buffers, cache_bytes
        self.seen: set[tuple[Draft | str, int]] = set()
        self.moved_bytes = 0
        self.written_at: dict[Draft, int] = {}

    def of(self, draft: Draft, cost: CostModel) -> _Work:
        """The work of the next node."""
        work = self._work(draft, cost) if draft.kernel in (POINTWISE, REDUCTION) else _Work()
        is_alone = draft.kernel in (EXTERN, SCATTER)
        if is_alone:
            self.moved_bytes += draft.op.read_bytes + draft.op.write_bytes
        self.moved_bytes += work.read_bytes
        if draft in self.buffers:
            self.moved_bytes += 0 if is_alone else draft.nbytes
            self.written_at[draft] = self.moved_bytes
        return work

    def _work(self, draft: Draft, cost: CostModel) -> _Work:
        read_bytes = cached_bytes = 0
        for source in draft.sources:
            key = (source, draft.depth)
            if source in self.buffers and key not in self.seen:
                self.seen.add(key)
                read_bytes += source.nbytes
                cached_bytes += source.nbytes if self._is_cached(source) else 0
        for name, nbytes in draft.input_reads:
            if (name, draft.depth) not in self.seen:
                self.seen.add((name, draft.depth))
                read_bytes += nbytes
        return _Work(cost.arithmetic_time_ns(draft.op), read_bytes, cached_bytes)

    def _is_cached(self, source: Draft) -> bool:
        written_at = self.written_at.get(source)
        return written_at is not None and self.moved_bytes - written_at + source.nbytes <= self.cache_bytes


def _time(draft: Draft, work: _Work, has_buffer: bool, cost: CostModel) -> int:
    """Time of a node in ns: its own kernel, or the longer of arithmetic and traffic, plus a launch if it writes a buffer."""
    if draft.kernel in (EXTERN, SCATTER):
        return draft.inner_time_ns or cost.op_time_ns(draft.op)
    if draft.kernel not in (POINTWISE, REDUCTION):
        return 0
    traffic_ns = cost.traffic_time_ns(work.read_bytes + (draft.nbytes if has_buffer else 0), work.cached_bytes)
    return (cost.launch_time_ns if has_buffer else 0) + max(work.arithmetic_ns, traffic_ns)


def _snapshot_time(draft: Draft, cost: CostModel) -> int:
    """Time of the kernel that copies an input, in ns; the backward then reads the copy in place of the input at the same cost."""
    return cost.launch_time_ns + cost.traffic_time_ns(2 * draft.nbytes)


def _save_time(draft: Draft, forward_buffers: set[Draft], backward_buffers: set[Draft], cost: CostModel) -> int:
    """Traffic time that only saving causes, in ns: the write in the forward, and the read by fused kernels of the backward."""
    if draft.kernel != POINTWISE:
        return 0
    traffic_ns = cost.traffic_time_ns(draft.nbytes * draft.mask_factor)
    write = 0 if draft in forward_buffers else traffic_ns
    read = 0 if draft in backward_buffers else traffic_ns
    return write + read
