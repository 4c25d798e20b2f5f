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

from compile_remat.cost_models import CostModel, Op
from compile_remat.passes.graph.node_drafts import Draft
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION, SCATTER


def price(values: Sequence[Draft], steps: Sequence[Draft], cost: CostModel) -> int:
    """Set `time_ns` of all drafts and `save_time_ns` of the values; returns the ns of a training step that recomputes nothing."""
    works = works_of(values, steps, cost.cache_bytes)
    step_time_ns = 0
    for draft, again in works.again.items():
        once = works.once.get(draft)
        draft.time_ns = draft.inner_time_ns or again.time_ns(cost)
        if once is not None:
            step_time_ns += draft.time_ns if once is again else once.time_ns(cost)
    for draft, saving in works.saving.items():
        draft.save_time_ns = sum(work.time_ns(cost) for work in saving)
    return step_time_ns


@dataclass(frozen=True)
class Work:
    """The counts of one node in a step that a cost model prices: of a kernel, or of a part of a fused kernel.

    Attributes:
        op: Counts of the node; None if it has no arithmetic.
        is_alone: True for a kernel of its own, False for a part of a fused kernel.
        is_written: True if the result of the part goes to memory: then it pays for the kernel's launch, too.
        moved_bytes: Bytes that the part is the first of its group to read, and those of its result if it is written.
        cached_bytes: Those of the bytes read that are in the cache.
        num_groups: Number of fused groups that compute the part.
    """

    op: Op | None = None
    is_alone: bool = False
    is_written: bool = False
    moved_bytes: int = 0
    cached_bytes: int = 0
    num_groups: int = 1

    def time_ns(self, cost: CostModel) -> int:
        """Time in ns: the kernel's, or the longer of the part's arithmetic and traffic, plus a launch if it is written."""
        arithmetic_ns = 0
        if self.op is not None:
            if self.is_alone:
                return cost.op_time_ns(self.op)
            arithmetic_ns = cost.arithmetic_time_ns(self.op) * self.num_groups
        traffic_ns = cost.traffic_time_ns(self.moved_bytes, self.cached_bytes)
        return (cost.launch_time_ns if self.is_written else 0) + max(arithmetic_ns, traffic_ns)


NOTHING = Work()
"""The work of a node that runs no kernel."""


@dataclass(frozen=True)
class Works:
    """The work of all nodes.

    Attributes:
        once: Of every node in a step that recomputes nothing, where snapshots do not run.
        again: Of every step, and of every value when the backward computes it.
        saving: Of every value, the traffic that saving it adds.
    """

    once: dict[Draft, Work]
    again: dict[Draft, Work]
    saving: dict[Draft, tuple[Work, ...]]


def works_of(values: Sequence[Draft], steps: Sequence[Draft], cache_bytes: int) -> Works:
    """Counts the work of each node; see the module's text for the traffic of fused kernels."""
    forward_buffers, backward_buffers = _nodes_with_buffers(values, steps)
    buffers = forward_buffers | backward_buffers
    first, again = _groups(values, steps, buffers)
    reads, reads_again = _Reads(buffers, first, cache_bytes), _Reads(buffers, again, cache_bytes)
    works = Works({}, {}, {})
    for draft in (*values, *steps):
        is_written = draft in (forward_buffers if draft.in_forward else backward_buffers)
        once = _work(draft, reads, is_written=is_written)
        once_more = _work(draft, reads_again, is_written=draft in backward_buffers)
        if draft.is_snapshot:  # runs only if it is saved; the backward then reads it in place of the input
            copy = Work(is_written=True, moved_bytes=2 * draft.nbytes)
            works.again[draft], works.saving[draft] = copy, (copy,)
            continue
        works.once[draft] = once
        works.again[draft] = once if draft.in_backward else once_more
        if not draft.in_backward:
            written_bytes = 0 if draft in forward_buffers else _written_bytes(draft, len(first[draft]))
            num_reads = 0 if draft in backward_buffers else len(again[draft])
            works.saving[draft] = _saving(draft, written_bytes, num_reads)
    return works


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

    def found(groups: dict[Draft, set[int]]) -> Groups:
        return {draft: groups[draft] if draft in in_several and groups[draft] else {draft.depth} for draft in groups}

    return found(first), found(again)


class _Reads:
    """Tracks the buffers that fused groups have read and written, node by node in execution order."""

    def __init__(self, buffers: set[Draft], groups: Groups, cache_bytes: int) -> None:
        self.buffers, self.groups, self.cache_bytes = buffers, groups, cache_bytes
        self.seen: set[tuple[Draft | str, int]] = set()
        self.moved_bytes = 0
        self.written_at: dict[Draft, int] = {}

    def of(self, draft: Draft) -> tuple[int, int]:
        """Bytes that the next node is the first of its groups to read, and those of them that are in the cache."""
        found = self._first_reads(draft) if draft.kernel in (POINTWISE, REDUCTION) else (0, 0)
        is_alone = draft.kernel in (EXTERN, SCATTER)
        if is_alone:
            self.moved_bytes += draft.op.read_bytes + draft.op.write_bytes
        self.moved_bytes += found[0]
        if draft in self.buffers:
            self.moved_bytes += 0 if is_alone else draft.nbytes
            self.written_at[draft] = self.moved_bytes
        return found

    def _first_reads(self, draft: Draft) -> tuple[int, int]:
        groups = self.groups[draft]
        loads: list[tuple[Draft | str, int, Collection[int]]] = [(n, nbytes, groups) for n, nbytes in draft.input_reads]
        loads += [(source, source.nbytes, groups) for source in draft.sources if source in self.buffers]
        # An operand in registers loads for this node's own group; in the others its bytes stand for what it loads.
        others = set(groups) - {draft.depth} if len(groups) > 1 else set[int]()
        loads += [(s, s.nbytes, others) for s in _large_sources(draft) if s not in self.buffers]
        read_bytes = cached_bytes = 0
        for source, nbytes, depths in loads:
            unread = [depth for depth in depths if (source, depth) not in self.seen]
            self.seen.update((source, depth) for depth in unread)
            read_bytes += nbytes * len(unread)
            if draft.depth in unread and isinstance(source, Draft) and self._is_cached(source):
                cached_bytes += nbytes
        return read_bytes, cached_bytes

    def _is_cached(self, source: Draft) -> bool:
        written_at = self.written_at.get(source)
        return written_at is not None and self.moved_bytes - written_at + source.nbytes <= self.cache_bytes


def _work(draft: Draft, reads: _Reads, *, is_written: bool) -> Work:
    read_bytes, cached_bytes = reads.of(draft)
    if draft.kernel in (EXTERN, SCATTER):
        return Work(draft.op, is_alone=True)
    if draft.kernel not in (POINTWISE, REDUCTION):
        return NOTHING
    moved_bytes = read_bytes + (draft.nbytes if is_written else 0)
    return Work(
        draft.op,
        is_written=is_written,
        moved_bytes=moved_bytes,
        cached_bytes=cached_bytes,
        num_groups=len(reads.groups[draft]),
    )


def _written_bytes(draft: Draft, num_groups: int) -> int:
    """Bytes that writing a value of registers adds to the forward: groups behind the first load it in place of its operands."""
    operand_bytes = sum(source.nbytes for source in _large_sources(draft))
    return max(0, draft.nbytes - (num_groups - 1) * max(0, operand_bytes - draft.nbytes))


def _saving(draft: Draft, written_bytes: int, num_reads: int) -> tuple[Work, ...]:
    """Traffic that only saving causes: the write in the forward, and a read by each fused group of the backward."""
    if draft.kernel != POINTWISE:
        return ()
    write, read = (Work(moved_bytes=nbytes * draft.mask_factor) for nbytes in (written_bytes, draft.nbytes))
    return (*([write] if written_bytes else []), *[read] * num_reads)
