"""Prices of single nodes from the price of fused groups.

The time of a plan must be a sum over its nodes, so that a cut, a linear bound and a local search can all use it.  So the memory
traffic of a fused kernel is split among its nodes: the first node of a fused group that reads a buffer pays for the read, a node
whose result goes to memory pays for the write, and a node whose result stays in registers costs its arithmetic alone.
Nodes of equal `Draft.depth`, the number of unfused kernels before them, form a fused group, and forward and backward have groups
of their own.  A separate reduction (`separate_reductions`) is a group of its own, and so is what reads its results.

A pointwise node without a buffer is computed in the group of each of its readers: a residual sum that three kernels read in
registers loads its operands three times, where a sum in memory is written once and loaded three times.

A step pays for what its own group reads, so a value that the backward computes again pays only for what no step of its group reads.
A saved value of registers pays for the loads of gradients; a value that is written again, such as a norm's, pays for its own.
A value that only the backward needs costs nothing until it is saved, and then the forward's work for it, or computed again.
A buffer of the forward that Inductor writes only because an expression loads many buffers is not counted as one: it is in registers
under a plan that saves one of the values in the expression.

A recently written buffer may still be in the device's cache: a fused kernel reads the buffer from there if no more than
`CostModel.cache_bytes` were read and written since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from compile_remat.cost_models import CostModel, Op
from compile_remat.passes.graph.node_drafts import Draft
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION, SCATTER


def price(values: Sequence[Draft], steps: Sequence[Draft], cost: CostModel) -> int:
    """Set `time_ns` of all drafts and `save_time_ns` of the values; returns the ns of a training step that recomputes nothing."""
    works = works_of(values, steps, cost.cache_bytes)
    for draft, work in works.again.items():
        draft.time_ns = draft.inner_time_ns or work.time_ns(cost)
    for draft, saving in works.saving.items():
        draft.save_time_ns = sum(work.time_ns(cost) for work in saving)
    return sum(draft.inner_time_ns or work.time_ns(cost) for draft, work in works.once.items())


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
        once: Of every value that the forward needs, and of every step, in a step that recomputes nothing.
        again: Of every step, and of every value when the backward computes it.
        saving: Of every value, the work that saving it adds: traffic, and all of the forward's work if only the backward needs it.
    """

    once: dict[Draft, Work]
    again: dict[Draft, Work]
    saving: dict[Draft, tuple[Work, ...]]


def works_of(values: Sequence[Draft], steps: Sequence[Draft], cache_bytes: int) -> Works:
    """Counts the work of each node; see the module's text for the traffic of fused kernels."""
    forward_buffers, backward_buffers = _nodes_with_buffers(values, steps)
    buffers = forward_buffers | backward_buffers
    leaves = _leaves(values, steps, buffers)
    first, again, loading = _groups(values, steps, buffers, leaves)
    reads = _Reads(buffers, first, leaves, cache_bytes)
    once = dict[Draft, Work]()
    for draft in (*(v for v in values if v.in_forward), *steps, *(v for v in values if not v.in_forward)):
        if not draft.is_snapshot:
            is_written = draft in (backward_buffers if draft.in_backward else forward_buffers)
            once[draft] = _work(draft, reads, is_written=is_written)
    works = Works(
        {d: work for d, work in once.items() if d.in_forward or d.in_backward}, {d: once[d] for d in steps}, {}
    )
    reads_again = _Reads(buffers, again, leaves, cache_bytes, set(reads.seen))
    early = _forwards_work(values, steps, once)
    needed = _needed(values, steps)
    # Values that no step needs come last: they never run again, and load for nobody.
    for draft in sorted(values, key=lambda value: value not in needed):
        if draft.is_snapshot:  # runs only if it is saved; the backward then reads it in place of the input
            copy = Work(is_written=True, moved_bytes=2 * draft.nbytes)
            works.again[draft], works.saving[draft] = copy, (copy,)
            continue
        works.again[draft] = _work(draft, reads_again, is_written=draft in backward_buffers)
        written_bytes = 0 if draft in forward_buffers else _written_bytes(draft, len(first[draft]))
        num_reads = 0 if draft in backward_buffers else len(loading[draft])
        works.saving[draft] = (*early.get(draft, ()), *_saving(draft, written_bytes, num_reads))
    return works


def _needed(values: Sequence[Draft], steps: Sequence[Draft]) -> set[Draft]:
    """The nodes that a step reads, directly or through others."""
    found = {source for draft in steps for source in draft.sources}
    for draft in reversed(values):
        if draft in found:
            found.update(draft.sources)
    return found


def _forwards_work(
    values: Sequence[Draft], steps: Sequence[Draft], once: Mapping[Draft, Work]
) -> dict[Draft, tuple[Work, ...]]:
    """The forward's work for each value that only the backward needs, if it is saved, with that for sources that only it reads."""
    num_readers = Counter(source for draft in (*values, *steps) for source in draft.sources)
    found = dict[Draft, tuple[Work, ...]]()
    for draft in values:
        if not (draft.in_forward or draft.is_snapshot):
            own = (work for source in draft.sources if num_readers[source] == 1 for work in found.get(source, ()))
            found[draft] = (once[draft], *own)
    return found


def _nodes_with_buffers(values: Sequence[Draft], steps: Sequence[Draft]) -> tuple[set[Draft], set[Draft]]:
    """Nodes that have a buffer in the forward, and nodes that have one when the backward computes them."""
    written = {
        d
        for d in (*values, *steps)
        if d.kernel != POINTWISE or (d.is_materialised and (d.in_backward or not d.is_written_for_reads))
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

Group = tuple[bool, int, int]
"""A fused group: True in the backward, the depth, and the group's place among those of this depth: odd of separate reductions."""

Groups = Mapping[Draft, Collection[Group]]
"""For each node, the fused groups that compute it."""

Leaves = Mapping[Draft, Mapping[Draft | str, int]]
"""For each node, the large buffers and inputs that a kernel loads to compute it in registers, with their bytes.

Of a buffer it is the buffer itself.  So it is of a node that Inductor writes because its expression loads many buffers, and of any
other node that is smaller than all that it loads: such a sum is the best to save.
"""


def _large_sources(draft: Draft) -> list[Draft]:
    return [source for source in draft.sources if source.nbytes * LARGE >= draft.nbytes > 0]


def _leaves(values: Sequence[Draft], steps: Sequence[Draft], buffers: Collection[Draft]) -> Leaves:
    found = dict[Draft, dict[Draft | str, int]]()
    for draft in (*values, *steps):
        if draft in buffers or draft.is_written_for_reads:
            found[draft] = {draft: draft.nbytes}
            continue
        found[draft] = {name: nbytes for name, nbytes in draft.input_reads if nbytes * LARGE >= draft.nbytes > 0}
        for source in _large_sources(draft):
            found[draft] |= found[source]
        if len(found[draft]) > 1 and draft.nbytes < sum(found[draft].values()):
            found[draft] = {draft: draft.nbytes}
    return found


def _own_groups(drafts: Sequence[Draft]) -> dict[Draft, Group]:
    """The group in which each node stands, in the graph that it belongs to."""
    found = dict[Draft, Group]()
    for draft in drafts:
        place = 0
        for source in draft.sources:
            in_backward, depth, before = found[source]
            if (in_backward, depth) == (draft.in_backward, draft.depth):
                place = max(place, before + before % 2)
        found[draft] = draft.in_backward, draft.depth, place + draft.is_separate
    return found


def _groups(
    values: Sequence[Draft], steps: Sequence[Draft], buffers: Collection[Draft], leaves: Leaves
) -> tuple[Groups, Groups, Groups]:
    """The groups of each node in a step that recomputes nothing, in a backward that recomputes all values, and those that load it.

    A node in registers that loads what one of its operands loads is another form of it, and the operand is in the groups of all its
    forms.  The operands of any other node in registers are in those of its groups that stand between the same kernels of libraries
    as the node.

    The third are groups of gradients that load the node if it is saved.  They lack those of a value that is written again, and
    those of a value with other operands, such as the next sum of a residual stream: recomputed, these pay for their operands.
    """
    drafts = (*values, *steps)
    stands = _own_groups(drafts)
    first: dict[Draft, set[Group]] = {draft: set() for draft in drafts}
    again: dict[Draft, set[Group]] = {draft: set() for draft in drafts}
    loading: dict[Draft, set[Group]] = {draft: set() for draft in drafts}
    for reader in reversed(drafts):
        own = stands[reader]
        own_again = (True, *own[1:])
        is_inlined = reader.kernel == POINTWISE and reader not in buffers
        runs_again = reader.in_backward or bool(again[reader])
        for source in reader.sources if reader.kernel in (POINTWISE, REDUCTION) else ():
            is_form = leaves[source] == leaves[reader]
            if (source.in_forward, source.in_backward) == (reader.in_forward, reader.in_backward):
                first[source] |= _passed_on(first[reader], own, is_form) if is_inlined else {own}
            if runs_again:
                passed_on = _passed_on(again[reader], own_again, is_form) if is_inlined else {own_again}
                again[source] |= passed_on
                if reader.in_backward:
                    loading[source] |= passed_on
                elif is_inlined and loading[reader] and (is_form or not reader.in_forward):
                    loading[source] |= _passed_on(loading[reader], own_again, is_form)
    in_registers = {draft for draft in drafts if draft.kernel == POINTWISE and draft not in buffers}
    return (
        {draft: first[draft] if draft in in_registers and first[draft] else {stands[draft]} for draft in drafts},
        {
            draft: again[draft] if draft in in_registers and again[draft] else {(True, *stands[draft][1:])}
            for draft in drafts
        },
        loading,
    )


def _passed_on(groups: set[Group], own: Group, is_form: bool) -> set[Group]:
    """Returns those groups of a node in registers in which its operand is loaded; the node's own if there is none."""
    return (groups if is_form else {group for group in groups if group[:2] == own[:2]}) or {own}


class _Reads:
    """Tracks the buffers that fused groups have read and written, node by node in execution order.

    Args:
        seen: Buffers and inputs that groups have read before.
    """

    def __init__(
        self,
        buffers: set[Draft],
        groups: Groups,
        leaves: Leaves,
        cache_bytes: int,
        seen: set[tuple[Draft | str, Group]] | None = None,
    ) -> None:
        self.buffers, self.groups, self.cache_bytes = buffers, groups, cache_bytes
        self.leaves = leaves
        self.seen, self.is_again = set() if seen is None else seen, seen is not None
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
            if not is_alone:
                self.seen.update((draft, group) for group in self.groups[draft])  # in registers there
        return found

    def _first_reads(self, draft: Draft) -> tuple[int, int]:
        groups, large = self.groups[draft], _large_sources(draft)
        loads: list[tuple[Draft | str, int, Collection[Group]]] = [
            (n, nbytes, groups) for n, nbytes in draft.input_reads
        ]
        loads += [(s, s.nbytes, groups) for s in draft.sources if s in self.buffers and s not in draft.parts]
        if len(large) > 1:
            # An operand in registers loads in its own groups; in the others its bytes stand for what it loads.
            loads += [
                (leaf, nbytes, set(groups) - set(self.groups[s]))
                for s in large
                if s not in self.buffers and s.in_backward == draft.in_backward
                for leaf, nbytes in self.leaves[s].items()
            ]
        if self.is_again and draft in self.buffers and not draft.in_backward:
            # Saved sums in registers: recomputed, the node's kernel loads them.
            loads += [
                (leaf, nbytes, groups)
                for s in large
                if s not in self.buffers
                for leaf, nbytes in self.leaves[s].items()
                if leaf not in self.buffers
            ]
        read_bytes = cached_bytes = 0
        for source, nbytes, places in loads:
            unread = [place for place in places if (source, place) not in self.seen]
            self.seen.update((source, place) for place in unread)
            read_bytes += nbytes * len(unread)
            is_soon = any(depth == draft.depth for _, depth, _ in unread)
            if is_soon and isinstance(source, Draft) and self._is_cached(source):
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
    written_bytes = draft.nbytes - sum(part.nbytes for part in draft.parts) if is_written else 0
    moved_bytes = read_bytes + max(0, written_bytes)
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
