"""Exact liveness of many plans at once.

A plan is a column of a boolean matrix `saved[value, plan]`.  The matrix gives the slot at which each value is recomputed
(`recompute_schedule`), the slots give the live ranges of buffers (`lifetimes`), and the live ranges give the live bytes at each
slot of the backward.  All plans of a batch go through the same numpy operations, so a plan costs about 0.05 ms where a walk over
the graph costs 10 ms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.buffers import Bools as Bools
from compile_remat.passes.memory.buffers import Ints as Ints
from compile_remat.passes.memory.buffers import readers_of
from compile_remat.passes.memory.forward import Forward
from compile_remat.passes.memory.lifetimes import LifetimeModel, Lifetimes
from compile_remat.passes.memory.recompute_schedule import RecomputeSchedule, Schedule
from compile_remat.passes.problem.problem import ITEM, Problem, Step, Value
from compile_remat.passes.problem.work_budget import WorkBudget

Floats = NDArray[np.float64]

BATCH_CELLS = 1 << 19
"""Most cells of one batch, (values + steps) x plans: each cell takes about 60 bytes while the batch is simulated.

Four times as many took an eighth longer on a Llama of 32 layers, because the kernel maps and unmaps such arrays each time.
"""

PRICED_CELLS = 1 << 23
"""Most such cells of plans that are priced together and not simulated."""

KEPT = 16
"""Number of batches of one plan that `Simulator.one` keeps."""


@dataclass(frozen=True)
class Batch:
    """Simulation of P plans; arrays are [values, P], [P] or [P, slots].

    Attributes:
        used: True for a value that is saved and read in the backward.
        recomputed: True for a value that the backward recomputes.
        time_ns: Time of the recomputed values plus the traffic of saving, [P].
        saved_bytes: Bytes of the saved tensors that the forward hands to the backward, without outputs, [P].
        forward_peak: Largest number of live bytes in the forward, [P].
        live: Live bytes at each slot of the backward, [P, slots]; slots past a plan's end hold 0.
        step_slots: Slot of each step, [P, steps].
        slots: Slot of each recomputed value, [values, P]; undefined for other values.
        begins: The slot at which a value's buffer begins, [values, P]; undefined where the value has no buffer.
        ends: The last slot at which a value's buffer is live, [values, P]; undefined where the value has no buffer.
        buffers: True where the plan recomputes a value into a buffer of its own, not into registers, [values, P].
        held_until: For `LifetimeModel.held`, the last slot at which a copy of an input is read, [K, P].
        copied: See `Lifetimes.copied`.
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
    held_until: NDArray[np.int32]
    copied: Sequence[tuple[int, NDArray[np.int32]]]

    @cached_property
    def backward_peak(self) -> Ints:
        """Largest number of live bytes in the backward, [P]."""
        return np.asarray(self.live.max(axis=1))

    @cached_property
    def peak(self) -> Ints:
        """Largest number of live bytes of forward and backward, [P]."""
        return np.asarray(np.maximum(self.backward_peak, self.forward_peak))

    def plan(self, p: int) -> Batch:
        """The batch of plan number `p` alone, as if only this plan had been simulated."""
        own = slice(p, p + 1)
        length = int(self.step_slots[p, -1]) + 1 if self.step_slots.shape[1] else 0
        return Batch(
            used=self.used[:, own].copy(),
            recomputed=self.recomputed[:, own].copy(),
            time_ns=self.time_ns[own].copy(),
            saved_bytes=self.saved_bytes[own].copy(),
            forward_peak=self.forward_peak[own].copy(),
            live=self.live[own, :length].copy(),
            step_slots=self.step_slots[own].copy(),
            slots=self.slots[:, own].copy(),
            begins=self.begins[:, own].copy(),
            ends=self.ends[:, own].copy(),
            buffers=self.buffers[:, own].copy(),
            held_until=self.held_until[:, own].copy(),
            copied=[(w, at[own].copy()) for w, at in self.copied],
        )


class Simulator:
    """Simulates plans of one problem; facts that are equal in every plan are computed once.

    Args:
        work: Counts the work of the simulated plans; None for a count without a limit.

    Attributes:
        incoming: Pairs of an output with `Value.gradient_readers` and the last step that reads the gradient coming in for it.
    """

    def __init__(self, problem: Problem, work: WorkBudget | None = None) -> None:
        self.problem = problem
        self.work = WorkBudget() if work is None else work
        values, steps = problem.values, problem.steps
        self.num_values, self.num_steps = len(values), len(steps)
        self.saved_nbytes = np.array([0 if v.is_output else v.nbytes for v in values], dtype=np.int64)
        self.time_ns = np.array([v.time_ns for v in values], dtype=np.int64)
        self.save_time_ns = np.array([v.save_time_ns for v in values], dtype=np.int64)
        self.position = np.array([v.position for v in values], dtype=np.int64)
        self.is_in_forward = np.array([v.in_forward and not v.is_snapshot for v in values], dtype=bool)
        self.is_saveable = np.array([v.is_saveable for v in values], dtype=bool)
        self.readers = readers_of(values)
        self.schedules = RecomputeSchedule(values, steps, self.readers)
        self.lifetimes = lifetimes = LifetimeModel(values, steps, self.readers, self.schedules.latest_step)
        self.nbytes = lifetimes.nbytes
        self.step_item_of = np.array(
            [s.gradients[0] if _is_item(s) else b for b, s in enumerate(steps)], dtype=np.int64
        )
        self.workspace = np.array([v.workspace_bytes + v.observed_bytes for v in values], dtype=np.int64)
        self.step_transient = np.array(
            [s.transient_bytes + s.workspace_bytes + s.observed_bytes for s in steps], dtype=np.int64
        )
        self.step_held = np.array([s.held_bytes for s in steps], dtype=np.int64)
        ends = lifetimes.step_end
        self.incoming = [
            (v, max(ends[b] for b in x.gradient_readers)) for v, x in enumerate(values) if x.gradient_readers
        ]
        self._incoming = np.array([v for v, _ in self.incoming], dtype=np.int64)
        self._incoming_ends = np.array([end for _, end in self.incoming], dtype=np.int64)
        self._place_steps()
        self.several = _Several(values)
        held_bytes = int(self.step_held.sum())
        self.forward = Forward(values, lifetimes.forward_stored, self.readers, held_bytes)
        self.output_bytes = int(sum(v.nbytes for v in values if v.is_output))
        self._kept: OrderedDict[bytes, Batch] = OrderedDict()

    def _place_steps(self) -> None:
        """Sets bytes that begin at each step's slot, less those reused in place there, and bytes (negative) that end behind it."""
        model, dying = self.lifetimes, self.lifetimes.step_last < self.num_steps
        self._begin_bytes, self._end_bytes = np.zeros(self.num_steps), np.zeros(self.num_steps)
        np.subtract.at(self._end_bytes, np.array(model.step_end, dtype=np.int64), self.step_held)
        np.add.at(self._begin_bytes, self.step_item_of, model.step_bytes)
        for at, is_over in ((self._begin_bytes, model.step_in_place > 0), (self._end_bytes, model.step_in_place == 0)):
            np.subtract.at(at, model.step_last[dying & is_over], model.step_bytes[dying & is_over])
        self._step_begins, self._step_ends = np.flatnonzero(self._begin_bytes), np.flatnonzero(self._end_bytes)

    # -- a batch ------------------------------------------------------------------------------------------------------

    def one(self, mask: Bools) -> Batch:
        """Simulates the plan that saves the values in `mask`, [values]; the last `KEPT` batches are kept."""
        key = mask.tobytes()
        found = self._kept.pop(key, None)
        if found is None:
            return self._keep(key, self.run(mask[:, None]))
        self._charge(1)
        return self._keep(key, found)

    def known(self, mask: Bools, batch: Batch) -> Batch:
        """Returns `batch`, which `Batch.plan` gave for `mask`: keeps the batch and charges its work, but simulates nothing."""
        self._charge(1)
        key = mask.tobytes()
        self._kept.pop(key, None)
        return self._keep(key, batch)

    def _keep(self, key: bytes, batch: Batch) -> Batch:
        self._kept[key] = batch
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return batch

    def _charge(self, plans: int) -> None:
        self.work.charge(plans * (self.num_values + self.num_steps))

    def batches(self, saved: Bools) -> Iterator[Batch]:
        """Simulates the plans in the columns of `saved`, [values, P], in batches of at most `BATCH_CELLS` cells."""
        for first in range(0, saved.shape[1], self.most_at_once):
            yield self.run(saved[:, first : first + self.most_at_once])

    @property
    def most_at_once(self) -> int:
        """Most plans in a batch."""
        return max(1, BATCH_CELLS // (self.num_values + self.num_steps))

    def run(self, saved: Bools) -> Batch:
        """Simulates the plans in the columns of `saved`, bool [values, P].  The caller has to obey the pins."""
        self._charge(saved.shape[1])
        schedule = self.schedules.of(saved)
        lifetimes = self.lifetimes.of(schedule)
        used, recomputed = schedule.used, schedule.recomputed
        saved_bytes = _sums(self.saved_nbytes, used)
        return Batch(
            used=used,
            recomputed=recomputed,
            time_ns=self._times_ns(used, recomputed),
            saved_bytes=saved_bytes,
            forward_peak=self.forward.peak(used, recomputed),
            live=self._live(schedule, lifetimes, saved_bytes),
            step_slots=schedule.step_slots,
            slots=schedule.slots,
            begins=lifetimes.begins,
            ends=lifetimes.ends,
            buffers=lifetimes.buffers,
            held_until=lifetimes.held_until,
            copied=lifetimes.copied,
        )

    def at_least(self, saved: Bools) -> tuple[Ints, Ints]:
        """`Batch.time_ns` of the plans in the columns of `saved`, and bytes that their peaks do not go below, each [P].

        A small part of the work of `run`.  Counted are the saved bytes at each place of the forward, and all of them at its end,
        with the input copies that steps read; a problem whose buffers wait on the host has negative ones.
        """
        used, recomputed = self.schedules.needs(saved)
        begin = _sums(self.saved_nbytes, used) + self.output_bytes + self.step_held.sum()
        return self._times_ns(used, recomputed), np.maximum(begin, self.forward.least_peaks(used))

    def outlines(self, saved: Bools) -> tuple[Ints, Ints]:
        """Returns `Batch.time_ns` of the plans in the columns of `saved`, and the number of slots of each plan's backward, [P]."""
        used, recomputed = self.schedules.needs(saved)
        return self._times_ns(used, recomputed), self.num_steps + recomputed.sum(axis=0)

    def costs(self, saved: Bools) -> tuple[Ints, Ints]:
        """Returns `Batch.time_ns` and `Batch.saved_bytes` of the plans in the columns of `saved`, each [P]."""
        most = max(1, PRICED_CELLS // (self.num_values + self.num_steps))
        times, nbytes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for first in range(0, saved.shape[1], most):
            used, recomputed = self.schedules.needs(saved[:, first : first + most])
            times.append(self._times_ns(used, recomputed))
            nbytes.append(_sums(self.saved_nbytes, used))
        return np.concatenate(times), np.concatenate(nbytes)

    def input_copy_bytes(self, recomputed: Bools) -> Ints:
        """Bytes of the input copies that the forward hands to the backward, [P]: steps or recomputed values read these copies."""
        held = self.forward.held
        return np.asarray(self.forward.held_nbytes @ recomputed[held] + self.step_held.sum(), dtype=np.int64)

    def _times_ns(self, used: Bools, recomputed: Bools) -> Ints:
        return np.asarray(_sums(self.time_ns, recomputed) + _sums(self.save_time_ns, used))

    def _live(self, schedule: Schedule, lifetimes: Lifetimes, saved_bytes: Ints) -> Ints:
        """Live bytes at each slot, [P, slots]: the running sum of the bytes that begin and end at each slot."""
        step_slots, length = schedule.step_slots, schedule.length
        alive, plans = lifetimes.alive, lifetimes.buffers.shape[1]
        width = length + 2
        rows = np.arange(plans, dtype=np.int64) * width
        own = np.flatnonzero((self.nbytes > 0) & alive.any(axis=1))
        nbytes = np.repeat(self.nbytes[own].astype(np.float64), plans).reshape(len(own), plans)
        made, freed = lifetimes.buffers[own], alive[own]
        begin, end, held = self._step_begins, self._step_ends, self.forward.held
        coming = schedule.used[self._incoming] * self.nbytes[self._incoming, None]
        again = schedule.recomputed[held]  # computed from copies of inputs
        copied = again * self.forward.held_nbytes[:, None]
        index = (
            (lifetimes.begins[own] + rows)[made],
            (lifetimes.ends[own] + (rows + 1))[freed],
            (step_slots[:, begin] + rows[:, None]).ravel(),
            (step_slots[:, end] + (rows[:, None] + 1)).ravel(),
            (step_slots.T[self._incoming_ends] + (rows + 1)).ravel(),
            (lifetimes.held_until + (rows + 1))[again],
        )
        weight = (
            nbytes[made],
            -nbytes[freed],
            np.tile(self._begin_bytes[begin], plans),
            np.tile(self._end_bytes[end], plans),
            -coming.ravel(),
            -copied[again],
        )
        delta = np.bincount(np.concatenate(index), np.concatenate(weight), minlength=plans * width)
        first = saved_bytes + coming.sum(axis=0) + self.input_copy_bytes(schedule.recomputed) + self.output_bytes
        delta[rows] += first
        live = np.cumsum(delta.reshape(plans, width), axis=1)[:, :length]
        self._add_transients(live, schedule)
        live[np.arange(length) > step_slots[:, -1:]] = 0
        live = np.asarray(live, dtype=np.int64)
        for w, at in lifetimes.copied:
            rows = np.flatnonzero(at >= 0)
            live[rows, at[rows]] += self.nbytes[w]
        return live

    def _add_transients(self, live: Any, schedule: Schedule) -> None:
        """Adds the bytes that live at one slot: workspaces, unread outputs, and outputs that a kernel makes again for a sibling."""
        recomputed, slots, step_slots = schedule.recomputed, schedule.slots, schedule.step_slots
        plans = np.arange(live.shape[0])
        steps = np.flatnonzero(self.step_transient)
        live[plans[:, None], step_slots[:, steps]] += self.step_transient[steps]  # no slot comes twice
        several = self.several
        nbytes = np.repeat(several.transient_bytes[:, None], len(plans), axis=1)
        for numbers, items in several.items:
            nbytes[numbers] += np.where(recomputed[items], 0, self.nbytes[items][:, None])
        for k, v in several.ordered:
            nbytes[k] -= np.where(self.lifetimes.is_in_order(v, schedule), self.nbytes[v], 0)
        made, of = np.nonzero(recomputed[several.values] & (nbytes > 0))
        live[of, slots[several.values[made], of]] += nbytes[made, of]
        working = np.flatnonzero(self.workspace)
        made, of = np.nonzero(recomputed[working])
        live[of, slots[working[made], of]] += self.workspace[working[made]]


def _sums(weights: Ints, mask: Bools) -> Ints:
    """Returns `weights @ mask`, [P]: exact below 2**53, and six times as fast as numpy's product of integers."""
    return np.asarray(np.einsum("v,vp->p", weights.astype(np.float64), mask.astype(np.float64)), dtype=np.int64)


def temporary_bytes(problem: Problem) -> int:
    """Most bytes live at once beyond the outputs, for a problem without a backward."""
    simulator = Simulator(problem)
    nothing = np.zeros(len(problem.values), dtype=bool)
    return max(0, int(simulator.one(nothing).peak[0]) - simulator.output_bytes)


def _is_item(step: Step) -> bool:
    return step.kernel == ITEM and bool(step.gradients)


class _Several:
    """Kernels with several outputs, or with output bytes that nothing reads.

    Attributes:
        values: Indices of the kernels' values, ascending, [K].
        transient_bytes: Bytes of each kernel's unread outputs, [K].
        items: For each k, the positions in `values` of the kernels with a k-th output, and the indices of these outputs.
        ordered: Pairs (position in `values`, index) of the concatenations that may be made in their reader's layout.
    """

    def __init__(self, values: Sequence[Value]) -> None:
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
        self.ordered = [(number, v) for number, (v, _) in enumerate(rows) if values[v].ordered_by]
