"""Buffers of values and steps in the backward, and their live ranges, for many plans at once.

The rules are Inductor's.  A pointwise value stays in registers, and its inputs stay alive until its readers run, unless the value
is saved or returned, an extern kernel reads the value, or the value gathers too many reads.
A pointwise kernel reuses the buffer of an input of its own size that dies there (``config.inplace_buffers``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.buffers import (
    Bools,
    Ints,
    effective_ends,
    is_always_stored,
    is_always_stored_again,
    may_be_written_over,
    overwrites,
    register_path,
    register_reads,
    sources_in_place,
    step_buffers,
    stored_steps,
)
from compile_remat.passes.memory.inplace import Overwriting
from compile_remat.passes.memory.reader_levels import ReaderLevel, in_levels
from compile_remat.passes.memory.recompute_schedule import Schedule
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, ITEM, POINTWISE, Step, Value


@dataclass(frozen=True)
class Lifetimes:
    """Live ranges of the buffers of P plans in the backward.

    Attributes:
        buffers: True where the plan recomputes a value into a buffer of its own, not into registers, [values, P].
        alive: True where a value has such a buffer or a saved one, [values, P].
        begins: The slot at which a value's buffer begins, [values, P]; undefined where the value has no buffer.
        ends: The last slot at which a value's buffer is live, [values, P]; undefined where the value has no buffer.
        taken: True where a later kernel reuses the buffer in place, which ends the buffer one slot earlier, [values, P].
        copied: For each copy that a reader of a concatenation may get: the concatenation, and the reader's slot if copy and
            concatenation are both alive there, [P]; -1 elsewhere.
        held_until: For `LifetimeModel.held`, the last slot at which a copy of an input is read, [K, P]; undefined where the value
            is not recomputed.
    """

    buffers: Bools
    alive: Bools
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]
    taken: Bools
    copied: Sequence[tuple[int, NDArray[np.int32]]]
    held_until: NDArray[np.int32]


@dataclass(frozen=True)
class _Level:
    """A level of values whose last reads depend on the plan.

    Attributes:
        readers: The values, with the readers that may run after the last step that reads the value.
        handing: Fused values: their inputs stay alive until the consumers of the fused kernel run.  Shape [H].
        may_be_stored: True for a fused value that has a buffer in some plan, [H, 1].
        joined: Fused values that are parts of a concatenation: pairs of position in `handing` and index.
    """

    readers: ReaderLevel
    handing: Ints
    may_be_stored: Bools
    joined: Sequence[tuple[int, int]]


class LifetimeModel:
    """Live ranges of one problem's buffers in the backward; facts that are equal in every plan are computed once.

    Args:
        latest_step: See `RecomputeSchedule`.

    Attributes:
        always_stored: True for a value that has a buffer in every plan that recomputes the value, [values].
        forward_stored: True for a value that has a buffer in the forward even if the plan does not save it, [values].
        last_step: The last step whose kernel reads each value, [values]; -1 for none.
        step_bytes, step_last, step_in_place: See `step_buffers`.
        step_in_place_sources: Pointwise steps, each with the values whose buffers the step could reuse in place.
        held: Indices of the values computed from copies of inputs, [K].
        copied_for: Maps each concatenation that is copied to the values and the steps that get a copy.
    """

    def __init__(
        self,
        values: Sequence[Value],
        steps: Sequence[Step],
        readers: Sequence[Sequence[int]],
        latest_step: NDArray[np.integer],
    ) -> None:
        self.values, self.readers = values, readers
        self.nbytes = np.array([v.nbytes for v in values], dtype=np.int64)
        self.held = np.flatnonzero([v.held_bytes for v in values])
        self.is_saved_buffer = np.array([v.nbytes > 0 and not v.is_output for v in values], dtype=bool)
        self.extern_readers = [[w for w in r if values[w].kernel == EXTERN] for r in readers]
        self.item_of = np.array(
            [v.reads[0] if v.kernel == ITEM and v.reads else i for i, v in enumerate(values)], dtype=np.int64
        )
        self._find_stored(values, steps)
        self.step_bytes, self.step_last, self.step_in_place = step_buffers(steps, self.step_stored, self.step_end)
        self.parts = [(w, value.parts) for w, value in enumerate(values) if value.parts]
        self.whole_of = {v: w for w, parts in self.parts for v in parts}
        self.copied_for = _copied_for(values, steps)
        self._levels = self._levels_of(self._readers_behind_steps(latest_step.tolist()))
        pairs = sources_in_place(values, self._always_stored)
        latest, last = latest_step.tolist(), self.last_step.tolist()
        self.overwriting = Overwriting([(w, [v for v in sources if last[v] < latest[w]]) for w, sources in pairs])
        self.step_in_place_sources = self._step_sources(values, steps)
        self.overwriting_steps = Overwriting(
            [(b, [v for v in sources if last[v] <= b]) for b, sources in self.step_in_place_sources]
        )

    def _find_stored(self, values: Sequence[Value], steps: Sequence[Step]) -> None:
        always_stored = [is_always_stored_again(v) for v in values]
        forward_stored = [is_always_stored(v) or v.is_output for v in values]
        self.step_stored = stored_steps(steps)
        self.step_end = effective_ends(steps, self.step_stored)
        self.reading_steps: list[list[int]] = [[] for _ in values]
        last_step = [-1] * len(values)
        for b, step in enumerate(steps):
            end, reads_memory = self.step_end[b], step.kernel == EXTERN or b == len(steps) - 1
            for v in step.reads:
                self.reading_steps[v].append(b)
                last_step[v] = max(last_step[v], end)
                if reads_memory and values[v].nbytes > 0 and values[v].kernel in (POINTWISE, CONSTANT):
                    always_stored[v] = True
        for v, externs in enumerate(self.extern_readers):
            is_read = not values[v].is_snapshot and any(values[w].in_forward for w in externs)
            if is_read and values[v].nbytes > 0:
                forward_stored[v] = True
        self.last_step = np.array(last_step, dtype=np.int32)
        self.always_stored = np.array(always_stored, dtype=bool)
        self.forward_stored = np.array(forward_stored, dtype=bool)
        self._always_stored: list[bool] = always_stored
        self.runs_once = self.always_stored | np.array([v.kernel != POINTWISE for v in values], dtype=bool)
        has_extern_reader = np.array([bool(r) for r in self.extern_readers], dtype=bool)
        self.is_sometimes_stored = has_extern_reader & ~self.always_stored & (self.nbytes > 0)

    def _readers_behind_steps(self, latest_step: Sequence[int]) -> list[tuple[int, list[int], bool]]:
        """Values whose last read depends on the plan, last value first, with readers that may run after the last reading step.

        The third item of an entry is True for a value in registers, whose inputs may be read after the value's own slot.
        """
        last, runs_once = self.last_step.tolist(), self.runs_once.tolist()
        behind = list(latest_step)  # the last step before which a reader's kernel runs
        found = []
        for v in range(len(last) - 1, -1, -1):
            readers = [w for w in self.readers[v] if behind[w] > last[v] or v in self.whole_of]
            if not runs_once[v]:
                behind[v] = max([behind[v], last[v], *(behind[w] for w in readers)])
            if readers or not runs_once[v]:
                found.append((v, readers, not runs_once[v]))
        return found

    def _levels_of(self, walk: Sequence[tuple[int, list[int], bool]]) -> list[_Level]:
        """Sorts the entries of `_readers_behind_steps` into levels."""
        handing = {v for v, _, hands_on in walk if hands_on}
        found = []
        for level in in_levels([(v, readers) for v, readers, _ in walk]):
            values = level.values[[v in handing for v in level.values.tolist()]]
            may_be_stored = self.is_sometimes_stored[values]
            joined = [(k, v) for k, v in enumerate(values.tolist()) if v in self.whole_of]
            found.append(_Level(level, values, may_be_stored[:, None], joined))
        return found

    def _step_sources(self, values: Sequence[Value], steps: Sequence[Step]) -> list[tuple[int, list[int]]]:
        """Pointwise steps that reuse no gradient's buffer, each with the values whose buffers the step could reuse in place."""
        busy = set(self.step_last[self.step_in_place > 0].tolist())
        pairs: list[tuple[int, list[int]]] = []
        for b, step in enumerate(steps):
            if overwrites(step) and self.step_stored[b] and b not in busy:
                path = register_path(register_reads(b, steps, self.step_stored), values, self._always_stored)
                sources = [v for v in path if may_be_written_over(values[v], step) and not values[v].is_output]
                if sources:
                    pairs.append((b, sources))
        return pairs

    def of(self, schedule: Schedule) -> Lifetimes:
        """Live ranges of the buffers of a schedule's plans."""
        recomputed = schedule.recomputed
        stored = self._stored(recomputed)
        ends, held_until = self._ends(schedule, stored)
        buffers = recomputed & stored
        begins, copied = self._joined(schedule, buffers, ends)
        alive = buffers | (schedule.used & self.is_saved_buffer[:, None])
        taken = self._taken(schedule, buffers, alive, ends)
        ends -= taken
        return Lifetimes(buffers, alive, begins, ends, taken, copied, held_until)

    def _stored(self, recomputed: Bools) -> Bools:
        """Mask of the values that have a buffer if the plan recomputes them, [values, P]."""
        stored = np.repeat(self.always_stored[:, None], recomputed.shape[1], axis=1)
        for v in np.flatnonzero(self.is_sometimes_stored):
            for w in self.extern_readers[v]:
                stored[v] |= recomputed[w]
        return stored

    def _ends(self, schedule: Schedule, stored: Bools) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The last slot at which each value is read from memory, [values, P].

        The second array is the last slot at which the input copies of the `held` values are read, [K, P].
        """
        recomputed, slots = schedule.recomputed, schedule.slots
        plans = recomputed.shape[1]
        by_step = np.concatenate(
            [schedule.step_slots.T, np.full((1, plans), -1, dtype=np.int32)]
        )  # the last row is for -1
        ends = by_step[self.last_step]
        reach = np.where(recomputed, slots, np.int32(-1))  # the last slot at which a reader's kernel runs
        for level in self._levels:
            level.readers.raise_rows(ends, reach)
            handing = level.handing
            is_in_registers = recomputed[handing] & ~(stored[handing] & level.may_be_stored)
            reach[handing] = np.where(is_in_registers, ends[handing], reach[handing])  # the inputs' last slot
            for k, v in level.joined:
                w = self.whole_of[v]
                has_place = is_in_registers[k] & recomputed[w] & stored[w]
                before, behind = self._around(v, schedule, by_step, reach)
                np.copyto(reach[v], before, where=has_place)
                np.copyto(ends[v], behind, where=has_place)
        return ends, reach[self.held]

    def _around(
        self, v: int, schedule: Schedule, by_step: NDArray[np.int32], reach: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The last slots, each [P], at which a fused part is computed and at which it is read from its concatenation; -1 for none.

        The concatenation writes the part to memory (``ConcatKernel.realize_into`` in ``ir.py``): a reader after the concatenation
        loads that memory, a reader before the concatenation inlines the part's expression.
        """
        place = schedule.slots[self.whole_of[v]]
        before, behind = place.copy(), np.full_like(place, -1)
        reads = [(schedule.slots[w], reach[w]) for w in self.readers[v]]
        reads += [(schedule.step_slots[:, b], by_step[self.step_end[b]]) for b in self.reading_steps[v]]
        for slot, end in reads:
            is_behind = slot > place
            np.maximum(before, end, out=before, where=~is_behind)
            np.maximum(behind, end, out=behind, where=is_behind)
        return before, behind

    def _joined(
        self, schedule: Schedule, buffers: Bools, ends: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], list[tuple[int, NDArray[np.int32]]]]:
        """Returns the slots at which buffers begin, [values, P], and `Lifetimes.copied`; changes `buffers` and `ends`.

        A part made inside of a concatenation loses its own buffer.  The concatenation's kernel writes a part that had no buffer,
        and readers load the part from the concatenation, which stays alive for them.
        """
        recomputed, slots = schedule.recomputed, schedule.slots
        begins = slots[self.item_of]
        kept: dict[int, NDArray[np.int32]] = {}  # the last slot at which parts are read from a concatenation
        for w, parts in self.parts:
            last = np.full(ends.shape[1], -1, dtype=np.int32)
            for v in parts:
                both = buffers[w] & buffers[v]
                np.maximum(last, ends[v], out=last, where=buffers[w] & recomputed[v])
                np.minimum(begins[w], slots[v], out=begins[w], where=both)
                buffers[v] &= ~both
            np.maximum(ends[w], last, out=ends[w])
            kept[w] = last
        copied = [each for w in self.copied_for for each in self._copies_of(w, schedule, kept.get(w))]
        return begins, copied

    def _copies_of(
        self, w: int, schedule: Schedule, kept_until: NDArray[np.int32] | None
    ) -> list[tuple[int, NDArray[np.int32]]]:
        """`Lifetimes.copied` of concatenation `w`, which stays alive for the next reader that gets a copy, or for its parts."""
        values, steps = self.copied_for[w]
        at = np.concatenate(
            [np.where(schedule.recomputed[values], schedule.slots[values], -1), schedule.step_slots.T[steps]]
        )
        at = np.where(schedule.recomputed[w] & ~self.is_in_order(w, schedule), at, np.int32(-1))
        until = at.max(axis=0) - 1  # at the last reader, only the copy is alive
        until = until if kept_until is None else np.maximum(until, kept_until)
        return [(w, np.where(row <= until, row, np.int32(-1))) for row in at]

    def is_in_order(self, w: int, schedule: Schedule) -> Any:
        """Mask of the plans that make concatenation `w` directly in its reader's layout, [P]: a saved channels-last input decides.

        A plan that also recomputes a value which gets a copy makes copies for all readers.
        """
        telling = list(self.values[w].ordered_by)
        if not telling:
            return np.False_
        readers = self.copied_for[w][0] if w in self.copied_for else []
        return schedule.used[telling].any(axis=0) & ~schedule.recomputed[readers].any(axis=0)

    def _taken(self, schedule: Schedule, buffers: Bools, alive: Bools, ends: NDArray[np.int32]) -> Bools:
        """Mask of the buffers that a later kernel reuses in place, so that the buffer ends one slot earlier, [values, P]."""
        taken = np.zeros(buffers.shape, dtype=bool)
        by_steps, by_values = self.overwriting_steps, self.overwriting
        free = np.ones((len(by_steps.kernels), buffers.shape[1]), dtype=bool)
        by_steps.mark(taken, free, schedule.step_slots.T[by_steps.kernels], alive, ends)
        by_values.mark(taken, buffers[by_values.kernels], schedule.slots[by_values.kernels], alive, ends)
        return taken


def _copied_for(values: Sequence[Value], steps: Sequence[Step]) -> dict[int, tuple[list[int], list[int]]]:
    found: dict[int, tuple[list[int], list[int]]] = {}
    for v, value in enumerate(values):
        for w in value.copies:
            found.setdefault(w, ([], []))[0].append(v)
    for b, step in enumerate(steps):
        for w in step.copies:
            found.setdefault(w, ([], []))[1].append(b)
    return found
