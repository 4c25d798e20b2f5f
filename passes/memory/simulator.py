"""Exact liveness of many plans at once.

A plan is a column of a boolean matrix `saved[value, plan]`.  From it follow, by the rule of torch's
``reordering_to_mimic_autograd_engine``, when each value is computed once more (just before its first reader, missing
ancestors first, in graph order), and from that which buffers live at each moment.  All plans of a batch go through
the same numpy operations, so that a plan costs about 0.05 ms where a walk over the graph costs 10.

Which values are buffers follows Inductor: a pointwise value stays in registers, and what it reads stays alive until
its own readers run, unless it is saved or returned, a kernel that is not fused reads it, or it gathers too many reads.
A pointwise kernel writes over an input of its own size that dies there (``config.inplace_buffers``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.buffers import (
    Bools as Bools,
)
from compile_remat.passes.memory.buffers import (
    Ints as Ints,
)
from compile_remat.passes.memory.buffers import (
    effective_ends,
    is_always_stored,
    may_be_written_over,
    overwrites,
    readers_of,
    register_path,
    register_reads,
    sources_in_place,
    step_buffers,
    stored_steps,
)
from compile_remat.passes.memory.forward import Forward
from compile_remat.passes.memory.inplace import Overwriting
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, ITEM, POINTWISE, Problem, Step, Value
from compile_remat.passes.problem.work_budget import WorkBudget

Floats = NDArray[np.float64]

BATCH_CELLS = 1 << 21
"""Values and steps times plans of one batch: about 60 bytes each while it runs."""

KEPT = 16
"""Batches of one plan that are kept."""

NEVER = np.int32(1 << 30)
"""Start of a value that the backward does not compute."""


@dataclass(frozen=True)
class Batch:
    """What a batch of P plans does; arrays are [values, P], [P] or [P, slots].

    Attributes:
        used: Saved and read in the backward.
        recomputed: Computed once more in the backward.
        time_ns: Recomputed work plus the traffic of saving, [P].
        saved_bytes: Bytes handed from forward to backward, without outputs, [P].
        forward_peak: Largest number of live bytes in the forward, [P].
        live: Live bytes at each slot of the backward, [P, slots]; slots past a plan's end hold 0.
        step_slots: Slot of each step, [P, steps].
        slots: Slot of each recomputed value, [values, P]; meaningless elsewhere.
        begins: The slot at which a value's buffer begins, [values, P]; meaningless where it has none.
        ends: The last slot at which a value's buffer counts, [values, P]; meaningless where it has none.
        buffers: Computed once more into memory, not just into registers, [values, P].
    """

    used: Bools
    recomputed: Bools
    time_ns: Ints
    saved_bytes: Ints
    forward_peak: Ints
    live: Ints
    step_slots: NDArray[np.int32]
    slots: NDArray[np.int32]
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]
    buffers: Bools

    @cached_property
    def backward_peak(self) -> Ints:
        """Largest number of live bytes in the backward, [P]."""
        return np.asarray(self.live.max(axis=1))

    @cached_property
    def peak(self) -> Ints:
        """Largest number of live bytes of forward and backward, [P]."""
        return np.asarray(np.maximum(self.backward_peak, self.forward_peak))


class Simulator:
    """Liveness of plans of one problem; everything that does not depend on the plan is worked out once.

    Args:
        work: Where the plans are counted.
    """

    def __init__(self, problem: Problem, work: WorkBudget | None = None) -> None:
        self.problem = problem
        self.work = WorkBudget() if work is None else work
        values, steps = problem.values, problem.steps
        self.num_values, self.num_steps = len(values), len(steps)
        self.nbytes = np.array([v.nbytes for v in values], dtype=np.int64)
        self.saved_nbytes = np.array([0 if v.is_output else v.nbytes for v in values], dtype=np.int64)
        self.time_ns = np.array([v.time_ns for v in values], dtype=np.int64)
        self.save_time_ns = np.array([v.save_time_ns for v in values], dtype=np.int64)
        self.position = np.array([v.position for v in values], dtype=np.int64)
        self.readers = readers_of(values)
        self.extern_readers = [[w for w in r if values[w].kernel == EXTERN] for r in self.readers]
        self.item_of = np.array([v.reads[0] if v.kernel == ITEM and v.reads else i for i, v in enumerate(values)])
        self.step_item_of = np.array([s.gradients[0] if _is_item(s) else b for b, s in enumerate(steps)])
        self.workspace = np.array([v.workspace_bytes for v in values], dtype=np.int64)
        self.step_transient = np.array([s.transient_bytes + s.workspace_bytes for s in steps], dtype=np.int64)
        self.step_held = np.array([s.held_bytes for s in steps], dtype=np.int64)
        self._place_in_backward(values, steps)
        self.step_bytes, self.step_last, self.step_in_place = step_buffers(steps, self.step_stored, self.step_end)
        self.overwriting = Overwriting(sources_in_place(values, self.always_stored))
        self.step_in_place_sources = self._step_sources(values, steps)
        self.overwriting_steps = Overwriting(self.step_in_place_sources)
        self.incoming = [
            (v, max(self.step_end[b] for b in x.gradient_readers)) for v, x in enumerate(values) if x.gradient_readers
        ]
        self.parts = [(w, value.parts) for w, value in enumerate(values) if value.parts]
        self.copied = [(w, v) for w, value in enumerate(values) for v in value.copies]
        self.ordered = {
            v: (list(value.ordered_by), [w for w, copied in self.copied if copied == v])
            for v, value in enumerate(values)
            if value.ordered_by
        }
        self.several = _Several(values, frozenset(self.ordered))
        returned = set(steps[-1].reads) if steps else set()
        self.drawn = np.flatnonzero([v.is_drawn and k not in returned for k, v in enumerate(values)])
        self.is_saveable = np.array([v.is_saveable for v in values], dtype=bool)
        self.is_extern = np.array([v.kernel == EXTERN for v in values], dtype=bool)
        self.extern_steps = np.flatnonzero([s.kernel == EXTERN for s in steps])
        self.forward = Forward(values, self.forward_stored, self.readers, self.drawn, int(self.step_held.sum()))
        self.output_bytes = int(sum(v.nbytes for v in values if v.is_output))
        self._kept: OrderedDict[bytes, Batch] = OrderedDict()

    # -- what no plan changes -----------------------------------------------------------------------------------------

    def _place_in_backward(self, values: Sequence[Value], steps: Sequence[Step]) -> None:
        n = self.num_values
        self.first_anchor = np.full(n, NEVER, dtype=np.int32)
        self.last_step = np.full(n, -1, dtype=np.int32)
        self._number_anchors(values)
        self.always_stored = np.array([is_always_stored(v) for v in values], dtype=bool)
        self.forward_stored = self.always_stored | np.array([v.is_output for v in values], dtype=bool)
        self.step_stored = stored_steps(steps)
        self.step_end = effective_ends(steps, self.step_stored)
        for b, step in enumerate(steps):
            for v in step.reads:
                self.first_anchor[v] = min(self.first_anchor[v], self.step_anchor[b])
                end = self.step_end[b]
                if end > self.last_step[v]:
                    self.last_step[v] = end
                if step.kernel == EXTERN or b == self.num_steps - 1:
                    self.always_stored[v] |= values[v].kernel in (POINTWISE, CONSTANT) and values[v].nbytes > 0
        for v in range(n):
            if any(values[w].in_forward for w in self.extern_readers[v]):
                self.forward_stored[v] |= values[v].nbytes > 0
        self.runs_once = self.always_stored | np.array([v.kernel != POINTWISE for v in values], dtype=bool)
        has_extern_reader = np.array([bool(r) for r in self.extern_readers], dtype=bool)
        self.is_sometimes_stored = has_extern_reader & ~self.always_stored & (self.nbytes > 0)

    def _number_anchors(self, values: Sequence[Value]) -> None:
        """Number what torch's reordering walks over, in the joint graph's order: the steps, late values before them."""
        late = [(value.late_step, 0, v) for v, value in enumerate(values) if value.late_step >= 0]
        walk = sorted(late + [(b, 1, b) for b in range(self.num_steps)])
        self.late_anchor = np.full(len(values), NEVER, dtype=np.int32)
        self.step_anchor = np.empty(self.num_steps, dtype=np.int32)
        for anchor, (_, is_step, index) in enumerate(walk):
            (self.step_anchor if is_step else self.late_anchor)[index] = anchor
        self.anchor_step = np.array([b for b, _, _ in walk], dtype=np.int32)

    def _step_sources(self, values: Sequence[Value], steps: Sequence[Step]) -> list[tuple[int, list[int]]]:
        """For each pointwise step that writes over no gradient, the values that it might be written over."""
        busy = set(self.step_last[self.step_in_place > 0].tolist())
        pairs = []
        for b, step in enumerate(steps):
            if overwrites(step) and self.step_stored[b] and b not in busy:
                path = register_path(register_reads(b, steps, self.step_stored), values, self.always_stored)
                sources = [v for v in path if may_be_written_over(values[v], step) and not values[v].is_output]
                if sources:
                    pairs.append((b, sources))
        return pairs

    # -- a batch ------------------------------------------------------------------------------------------------------

    def one(self, mask: Bools) -> Batch:
        """Simulate the plan that saves the values in `mask`, [values]; the last ones asked for are kept."""
        key = mask.tobytes()
        found = self._kept.pop(key, None)
        if found is None:
            found = self.run(mask[:, None])
        else:
            self._charge(1)
        self._kept[key] = found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    def _charge(self, plans: int) -> None:
        self.work.charge(plans * (self.num_values + self.num_steps))

    def batches(self, saved: Bools) -> Iterator[Batch]:
        """Simulate the plans in the columns of `saved`, as many at a time as memory should bear."""
        most = max(1, BATCH_CELLS // (self.num_values + self.num_steps))
        for first in range(0, saved.shape[1], most):
            yield self.run(saved[:, first : first + most])

    def run(self, saved: Bools) -> Batch:
        """Simulate the plans in the columns of `saved`, bool [values, P].  Pins are the caller's affair."""
        self._charge(saved.shape[1])
        start, recomputed = self._starts(saved)
        used = saved & (start < NEVER)
        slots, step_slots, length = self._slots(start, recomputed)
        stored = self._stored(recomputed)
        ends = self._ends(recomputed, stored, slots, step_slots)
        buffers = recomputed & stored
        if len(self.drawn):
            self._leave_in_registers(buffers, recomputed, slots, step_slots, ends, length)
        begins, beside = self._joined(buffers, slots, ends)
        alive = buffers | (used & (self.saved_nbytes > 0)[:, None])
        ends -= self._taken(buffers, alive, slots, step_slots, ends)
        saved_bytes = self.saved_nbytes @ used
        live = self._live(used, recomputed, buffers, alive, slots, begins, step_slots, ends, saved_bytes, length)
        self._add_beside(live, used, recomputed, slots, beside)
        time_ns = self.time_ns @ recomputed + self.save_time_ns @ used
        peak = self.forward.peak(used)
        return Batch(used, recomputed, time_ns, saved_bytes, peak, live, step_slots, slots, begins, ends, buffers)

    def _joined(
        self, buffers: Bools, slots: NDArray[np.int32], ends: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], list[tuple[int, NDArray[np.int32]]]]:
        """Where buffers begin, [values, P]; what is made inside a concatenation has none of its own any more.

        With that, up to which slot a concatenation and the copy that its reader gets are both alive, [P].
        """
        begins = slots[self.item_of]
        beside: list[tuple[int, NDArray[np.int32]]] = []
        for w, parts in self.parts:
            own, last = ends[w].copy(), np.full(ends.shape[1], -1, dtype=np.int32)
            for v in parts:
                both = buffers[w] & buffers[v]
                np.maximum(last, ends[v], out=last, where=both)
                np.minimum(begins[w], slots[v], out=begins[w], where=both)
                buffers[v] &= ~both
            np.maximum(ends[w], last, out=ends[w])
            if self.problem.values[w].transient_bytes:
                beside.append((w, np.minimum(own, last)))
        return begins, beside

    def _add_beside(
        self,
        live: Ints,
        used: Bools,
        recomputed: Bools,
        slots: NDArray[np.int32],
        beside: Sequence[tuple[int, NDArray[np.int32]]],
    ) -> None:
        """Copies of concatenations that live on for what is made inside them."""
        at = np.arange(live.shape[1])
        for w, last in beside:
            rows = np.flatnonzero((last > slots[w]) & ~self._is_in_order(w, used, recomputed))
            is_beside = (at > slots[w, rows][:, None]) & (at <= last[rows][:, None])
            live[rows] += is_beside * self.nbytes[w]

    def _starts(self, saved: Bools) -> tuple[NDArray[np.int32], Bools]:
        """The anchor as which, or for which, each value is computed at the latest, and what is recomputed."""
        n, plans = saved.shape
        start = np.empty((n, plans), dtype=np.int32)
        reach = np.empty((n, plans), dtype=np.int32)  # the start that a value hands to what it reads
        barred = saved * NEVER
        first, is_late = list(self.first_anchor), (self.late_anchor < NEVER).tolist()
        for v in range(n - 1, -1, -1):
            row, readers = start[v], self.readers[v]
            if readers:
                np.minimum(first[v], reach[readers[0]], out=row)
                for w in readers[1:]:
                    np.minimum(row, reach[w], out=row)
            else:
                row[:] = first[v]
            if is_late[v]:
                np.minimum(row, self.late_anchor[v], out=row, where=row < NEVER)
            np.maximum(row, barred[v], out=reach[v])
        return start, (reach < NEVER)

    def _slots(self, start: NDArray[np.int32], recomputed: Bools) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        n, plans = start.shape
        m = self.num_steps
        order = np.argsort(np.where(recomputed, start, NEVER).T, axis=1, kind="stable")
        last = len(self.anchor_step) - 1
        burst = np.where(recomputed, self.anchor_step[np.minimum(start, last)], m).T  # [P, n]: the step that follows
        rank = np.empty((plans, n), dtype=np.int32)
        np.put_along_axis(rank, order, np.broadcast_to(np.arange(n, dtype=np.int32), (plans, n)), axis=1)
        slots = np.ascontiguousarray((rank + burst).T).astype(np.int32)
        flat = (burst + np.arange(plans)[:, None] * (m + 1)).ravel()
        counts = np.bincount(flat, minlength=plans * (m + 1)).reshape(plans, m + 1)[:, :m]
        step_slots = (np.cumsum(counts, axis=1) + np.arange(m)).astype(np.int32)
        length = int(step_slots[:, -1].max()) + 1 if m else 0
        return slots, step_slots, length

    def _stored(self, recomputed: Bools) -> Bools:
        stored = np.repeat(self.always_stored[:, None], recomputed.shape[1], axis=1)
        for v in np.flatnonzero(self.is_sometimes_stored):
            for w in self.extern_readers[v]:
                stored[v] |= recomputed[w]
        return stored

    def _leave_in_registers(
        self,
        buffers: Bools,
        recomputed: Bools,
        slots: NDArray[np.int32],
        step_slots: NDArray[np.int32],
        ends: NDArray[np.int32],
        length: int,
    ) -> None:
        """Random numbers have no buffer where no unfused kernel runs between them and the last that reads them."""
        plans = np.arange(buffers.shape[1])
        at = np.zeros((len(plans), length + 1), dtype=np.int32)
        made, of = np.nonzero(recomputed & self.is_extern[:, None])
        at[of, slots[made, of]] = 1
        at[plans[:, None], step_slots[:, self.extern_steps]] = 1
        externs = np.cumsum(at, axis=1)
        rows = self.drawn
        first = externs[plans, np.minimum(slots[rows], length)]
        buffers[rows] &= externs[plans, np.clip(ends[rows], 0, length)] > first

    def _ends(
        self, recomputed: Bools, stored: Bools, slots: NDArray[np.int32], step_slots: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        n, plans = recomputed.shape
        ends = np.empty((n, plans), dtype=np.int32)
        reach = np.where(recomputed, slots, np.int32(-1))  # the last slot at which a reader's kernel runs
        in_registers = recomputed & ~stored
        by_step = np.concatenate([step_slots.T, np.full((1, plans), -1, dtype=np.int32)])  # for -1 its last row
        last_step, runs_once = self.last_step.tolist(), self.runs_once.tolist()
        for v in range(n - 1, -1, -1):
            row, readers = ends[v], self.readers[v]
            if readers:
                np.maximum(by_step[last_step[v]], reach[readers[0]], out=row)
                for w in readers[1:]:
                    np.maximum(row, reach[w], out=row)
            else:
                row[:] = by_step[last_step[v]]
            if not runs_once[v]:
                np.maximum(row, reach[v], out=reach[v], where=in_registers[v])
        return ends

    def _live(
        self,
        used: Bools,
        recomputed: Bools,
        buffers: Bools,
        alive: Bools,
        slots: NDArray[np.int32],
        begins: NDArray[np.int32],
        step_slots: NDArray[np.int32],
        ends: NDArray[np.int32],
        saved_bytes: Ints,
        length: int,
    ) -> Ints:
        plans = buffers.shape[1]
        width = length + 2
        rows = np.arange(plans, dtype=np.int64) * width
        index, weight = [], []
        own = np.flatnonzero((self.nbytes > 0) & alive.any(axis=1))
        grid_bytes = np.broadcast_to(self.nbytes[own][:, None], (len(own), plans))
        made = buffers[own]
        index.append((begins[own] + rows)[made])
        weight.append(grid_bytes[made])
        freed = alive[own]
        index.append((ends[own] + 1 + rows)[freed])
        weight.append(-grid_bytes[freed])
        kept = np.flatnonzero(self.step_bytes)
        flat_bytes = np.broadcast_to(self.step_bytes[kept], (plans, len(kept)))
        index.append((step_slots[:, self.step_item_of[kept]] + rows[:, None]).ravel())
        weight.append(flat_bytes.ravel())
        dying = kept[self.step_last[kept] < self.num_steps]
        free_at = step_slots[:, self.step_last[dying]] + 1 - self.step_in_place[dying]
        index.append((free_at + rows[:, None]).ravel())
        weight.append(-np.broadcast_to(self.step_bytes[dying], (plans, len(dying))).ravel())
        holding = np.flatnonzero(self.step_held)
        index.append((step_slots[:, holding] + 1 + rows[:, None]).ravel())
        weight.append(-np.broadcast_to(self.step_held[holding], (plans, len(holding))).ravel())
        delta = np.bincount(np.concatenate(index), np.concatenate(weight), minlength=plans * width)
        live = np.cumsum(delta.reshape(plans, width), axis=1)[:, :length]
        live = live + (saved_bytes + self.output_bytes + self.step_held.sum())[:, None]
        for v, end in self.incoming:
            live += (used[v][:, None] & (np.arange(length) <= step_slots[:, end][:, None])) * self.nbytes[v]
        self._add_transients(live, used, recomputed, slots, step_slots)
        live[np.arange(length) > step_slots[:, -1:]] = 0
        return np.asarray(live, dtype=np.int64)

    def _is_in_order(self, v: int, used: Bools, recomputed: Bools) -> Any:
        """Whether a concatenation is made in the order that its reader wants, [P]: what is saved tells it; two get copies."""
        if v not in self.ordered:
            return np.False_
        telling, readers = self.ordered[v]
        return used[telling].any(axis=0) & ~recomputed[readers].any(axis=0)

    def _add_transients(
        self, live: Any, used: Bools, recomputed: Bools, slots: NDArray[np.int32], step_slots: NDArray[np.int32]
    ) -> None:
        """Outputs of multi-output kernels that nothing reads, or that are saved and made once more for a sibling."""
        plans = np.arange(live.shape[0])
        steps = np.flatnonzero(self.step_transient)
        live[plans[:, None], step_slots[:, steps]] += self.step_transient[steps]  # no slot comes twice
        several = self.several
        nbytes = np.repeat(several.transient_bytes[:, None], len(plans), axis=1)
        for numbers, items in several.items:
            nbytes[numbers] += np.where(recomputed[items], 0, self.nbytes[items][:, None])
        for k, v in several.ordered:
            nbytes[k] -= np.where(self._is_in_order(v, used, recomputed), self.nbytes[v], 0)
        made, of = np.nonzero(recomputed[several.values] & (nbytes > 0))
        live[of, slots[several.values[made], of]] += nbytes[made, of]
        for w, v in self.copied:
            rows = np.flatnonzero(recomputed[v] & recomputed[w])
            live[rows, slots[v, rows]] += self.nbytes[v]
        working = np.flatnonzero(self.workspace)
        made, of = np.nonzero(recomputed[working])
        live[of, slots[working[made], of]] += self.workspace[working[made]]

    def _taken(
        self,
        buffers: Bools,
        alive: Bools,
        slots: NDArray[np.int32],
        step_slots: NDArray[np.int32],
        ends: NDArray[np.int32],
    ) -> Bools:
        """Whether a later kernel writes over the value's buffer, so that it counts one slot less, [values, P]."""
        taken = np.zeros(buffers.shape, dtype=bool)
        by_steps, by_values = self.overwriting_steps, self.overwriting
        free = np.ones((len(by_steps.kernels), buffers.shape[1]), dtype=bool)
        by_steps.mark(taken, free, step_slots.T[by_steps.kernels], alive, ends)
        by_values.mark(taken, buffers[by_values.kernels], slots[by_values.kernels], alive, ends)
        return taken


def _is_item(step: Step) -> bool:
    return step.kernel == ITEM and bool(step.gradients)


class _Several:
    """Kernels with several outputs, or with bytes that nothing reads.

    Attributes:
        values: Their indices, ascending, [K].
        transient_bytes: What each writes for nobody, [K].
        items: Which of them have a k-th output that is read, and these outputs, for each k.
        ordered: Those among the concatenations that may be made in their reader's order: number and index.
    """

    def __init__(self, values: Sequence[Value], ordered: Collection[int]) -> None:
        found: dict[int, list[int]] = {v: [] for v, value in enumerate(values) if value.transient_bytes}
        for i, value in enumerate(values):
            if value.kernel == ITEM and value.reads and value.nbytes:
                found.setdefault(value.reads[0], []).append(i)
        rows = sorted(found.items())
        self.values = np.array([v for v, _ in rows], dtype=np.int64)
        self.transient_bytes = np.array([values[v].transient_bytes for v, _ in rows], dtype=np.int64)
        self.items = []
        for k in range(max((len(items) for _, items in rows), default=0)):
            pairs = [(number, items[k]) for number, (_, items) in enumerate(rows) if len(items) > k]
            numbers, items = np.array(pairs, dtype=np.int64).T
            self.items.append((numbers, items))
        self.ordered = [(number, v) for number, (v, _) in enumerate(rows) if v in ordered]
