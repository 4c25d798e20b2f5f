"""Prices of single nodes from the price of fused groups.

The time of a plan must be a sum over its nodes, so that a cut, a linear bound and a local search can all use it.  So the memory
traffic of a fused kernel is split among its nodes: the first node of a fused group that reads a buffer pays for the read, a node
whose result goes to memory pays for the write, and a node whose result stays in registers costs its arithmetic alone.
Nodes of equal `Draft.depth`, the number of unfused kernels before them, form a fused group.

A pointwise node of several large operands is computed in the group of each of its readers if it has no buffer: a residual sum that
three kernels read in registers loads its operands three times, where a sum in memory is written once and loaded three times.
A buffer that Inductor writes only because an expression loads many buffers is not counted as one: it is in registers under a plan
that saves one of the values in the expression.

A recently written buffer may still be in the device's cache: a fused kernel reads the buffer from there if no more than
`CostModel.cache_bytes` were read and written since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from compile_remat.cost_models import CostModel
from compile_remat.passes.graph.node_drafts import Draft
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION, SCATTER


def price(values: Sequence[Draft], steps: Sequence[Draft], cost: CostModel) -> int:
    """Set `time_ns` of all drafts and `save_time_ns` of the values; returns the ns of a training step that recomputes nothing."""
    forward_buffers, backward_buffers = _nodes_with_buffers(values, steps)
    buffers = forward_buffers | backward_buffers
    first, again = _groups(values, steps, buffers)
    reads, reads_again = _Reads(buffers, first, cost.cache_bytes), _Reads(buffers, again, cost.cache_bytes)
    once_more: dict[Draft, int] = {}
    for draft in (*values, *steps):
        has_buffer = draft in (forward_buffers if draft.in_forward else backward_buffers)
        draft.time_ns = _time(draft, reads.of(draft, cost), has_buffer, cost)
        once_more[draft] = _time(draft, reads_again.of(draft, cost), draft in backward_buffers, cost)
    only_if_saved = {d: _snapshot_time(d, cost) for d in values if d.is_snapshot}
    step_time_ns = sum(d.time_ns for d in (*values, *steps) if d not in only_if_saved)
    for draft in values:
        draft.time_ns = once_more[draft]  # a buffer of the forward may stay in registers in the backward
        draft.save_time_ns = _save_time(
            draft, forward_buffers, backward_buffers, len(first[draft]), len(again[draft]), cost
        )
        if draft in only_if_saved:  # a snapshot runs only if it is saved
            draft.time_ns = draft.save_time_ns = only_if_saved[draft]
    return step_time_ns


def _nodes_with_buffers(values: Sequence[Draft], steps: Sequence[Draft]) -> tuple[set[Draft], set[Draft]]:
    """Nodes that have a buffer in the forward, and nodes that have one when the backward computes them."""
    written = {
        d for d in (*values, *steps) if d.kernel != POINTWISE or (d.is_materialised and not d.is_written_for_reads)
    }
    forward = {d for d in values if d in written or d.is_output}
    backward = {d for d in (*values, *steps) if d in written or (d.in_backward and d.is_output)}
    for draft in values:
        if draft.kernel == EXTERN:
            forward.update(draft.sources)
    for draft in steps:
        if draft.kernel == EXTERN:
            backward.update(draft.sources)
    return forward, backward


LARGE = 8
"""An operand is large if it has at least 1/8 of the bytes of the result: statistics and vectors are not."""

Groups = Mapping[Draft, Collection[int]]
"""For each node, the depths of the fused groups that compute it."""


def _large_sources(draft: Draft) -> list[Draft]:
    return [source for source in draft.sources if source.nbytes * LARGE >= draft.nbytes > 0]


def _groups(values: Sequence[Draft], steps: Sequence[Draft], buffers: Collection[Draft]) -> tuple[Groups, Groups]:
    """The groups of each node in a step that recomputes nothing, and those in a backward that recomputes all values.

    A node in registers with one large operand is another form of it, and the operand is in the groups of all its forms.
    """
    first: dict[Draft, set[int]] = {draft: set() for draft in (*values, *steps)}
    again: dict[Draft, set[int]] = {draft: set() for draft in (*values, *steps)}
    for reader in (*reversed(steps), *reversed(values)):
        large, own = _large_sources(reader), {reader.depth}
        is_form = reader.kernel == POINTWISE and reader not in buffers and len(large) == 1
        runs_again = reader.in_backward or bool(again[reader])
        for source in reader.sources if reader.kernel in (POINTWISE, REDUCTION) else ():
            passes_on = is_form and source in large
            if source.in_backward == reader.in_backward:
                first[source] |= (first[reader] or own) if passes_on else own
            if runs_again:
                again[source] |= (again[reader] or own) if passes_on else own
    in_several = {d for d in first if d.kernel == POINTWISE and d not in buffers and len(_large_sources(d)) > 1}
    return tuple(
        {d: (groups[d] if d in in_several else set()) or {d.depth} for d in groups} for groups in (first, again)
    )


@dataclass(frozen=True)
class _Work:
    """Arithmetic of a fused node, bytes that it is the first of its groups to read, and how many of these are in the cache."""

    arithmetic_ns: int = 0
    read_bytes: int = 0
    cached_bytes: int = 0


class _Reads:
    """Tracks the buffers that fused groups have read and written, node by node in execution order."""

    def __init__(self, buffers: set[Draft], groups: Groups, cache_bytes: int) -> None:
        self.buffers, self.groups, self.cache_bytes = buffers, groups, cache_bytes
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
        groups = self.groups[draft]
        loads: list[tuple[Draft | str, int, Collection[int]]] = [(n, nbytes, groups) for n, nbytes in draft.input_reads]
        loads += [(source, source.nbytes, groups) for source in draft.sources if source in self.buffers]
        if (
            len(groups) > 1
        ):  # an operand in registers loads for this node's own group; in the others its bytes stand for that
            loads += [
                (s, s.nbytes, set(groups) - {draft.depth}) for s in _large_sources(draft) if s not in self.buffers
            ]
        read_bytes = cached_bytes = 0
        for source, nbytes, depths in loads:
            unread = [depth for depth in depths if (source, depth) not in self.seen]
            self.seen.update((source, depth) for depth in unread)
            read_bytes += nbytes * len(unread)
            if draft.depth in unread and isinstance(source, Draft) and self._is_cached(source):
                cached_bytes += nbytes
        return _Work(cost.arithmetic_time_ns(draft.op) * len(groups), read_bytes, cached_bytes)

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


def _save_time(
    draft: Draft,
    forward_buffers: set[Draft],
    backward_buffers: set[Draft],
    num_first: int,
    num_again: int,
    cost: CostModel,
) -> int:
    """Traffic time that only saving causes, in ns: the write in the forward, and a read by each fused group of the backward.

    In the forward, groups behind the first then load the value in place of its operands.
    """
    if draft.kernel != POINTWISE:
        return 0
    traffic_ns = cost.traffic_time_ns(draft.nbytes * draft.mask_factor)
    operands_ns = cost.traffic_time_ns(sum(source.nbytes for source in _large_sources(draft)))
    relief_ns = (num_first - 1) * max(0, operands_ns - traffic_ns)
    write = 0 if draft in forward_buffers else max(0, traffic_ns - relief_ns)
    read = 0 if draft in backward_buffers else num_again * traffic_ns
    return write + read
