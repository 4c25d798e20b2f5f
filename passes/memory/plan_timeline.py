"""The exact timeline of one plan: which buffer lives when, in forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat.passes.memory.candidate_plan import Candidate, candidate
from compile_remat.passes.memory.recompute_schedule import NEVER
from compile_remat.passes.memory.simulator import Batch, Bools, Simulator
from compile_remat.passes.problem.plan import Plan
from compile_remat.passes.problem.problem import Problem


@dataclass(frozen=True)
class Timeline:
    """Live bytes of one plan.

    Attributes:
        kernels: Names of what runs in the backward, in order: recomputed values and steps.
        live_bytes: Live bytes while each of them runs.
        forward_peak_bytes: The most bytes live at once in the forward.
        peak_bytes: The most of both.
        largest: The largest buffers at the backward's peak, largest first.
    """

    kernels: tuple[str, ...]
    live_bytes: tuple[int, ...]
    forward_peak_bytes: int
    peak_bytes: int
    largest: tuple[LiveBuffer, ...]


def timeline(problem: Problem, plan: Plan) -> Timeline:
    """Liveness of `plan` on `problem`; ValueError where the plan saves what the problem lacks or what cannot be saved."""
    found = _candidate_of(problem, plan.saved, plan.again)
    return timeline_of(found.simulator, found.saved)


def peak_bytes_of(problem: Problem, saved: Sequence[str], again: Sequence[str] = ()) -> int:
    """Region peak of the plan that saves the named values and computes those in `again` twice; ValueError as in `timeline`."""
    return _candidate_of(problem, saved, again).peak_bytes


def _candidate_of(problem: Problem, names: Sequence[str], again: Sequence[str]) -> Candidate:
    index = {v.name: i for i, v in enumerate(problem.values)}
    unknown = [name for name in names if name not in index]
    if unknown:
        raise ValueError(f"the plan saves {unknown[0]!r}, which the problem does not have")
    tuples = [name for name in names if not problem.values[index[name]].is_saveable]
    if tuples:
        raise ValueError(f"the plan saves {tuples[0]!r}, which cannot be saved")
    saved = np.zeros(len(problem.values), dtype=bool)
    saved[[index[name] for name in names]] = True
    return candidate(problem, saved, again)


def timeline_of(simulator: Simulator, saved: Bools, keep: int = 5) -> Timeline:
    """Liveness of the plan that saves the values in `saved`, bool [values]."""
    batch = simulator.one(saved)
    problem = simulator.problem
    length = int(batch.step_slots[0, -1]) + 1
    names = [""] * length
    for v in np.flatnonzero(batch.recomputed[:, 0]):
        names[batch.slots[v, 0]] = problem.values[v].name
    for b, slot in enumerate(batch.step_slots[0]):
        names[slot] = problem.steps[b].name
    live = batch.live[0, :length]
    peak_slot = int(np.argmax(live))
    alive = _alive_at(simulator, batch, peak_slot)
    return Timeline(
        tuple(names),
        tuple(int(x) for x in live),
        int(batch.forward_peak[0]),
        int(batch.peak[0]),
        tuple(sorted(alive, key=lambda b: (-b.nbytes, b.name))[:keep]),
    )


def _alive_at(simulator: Simulator, batch: Batch, slot: int) -> list[LiveBuffer]:
    return [
        *_values_at(simulator, batch, slot),
        *_others_at(simulator, batch, slot),
        *_steps_at(simulator, batch, slot),
    ]


def _values_at(simulator: Simulator, batch: Batch, slot: int) -> list[LiveBuffer]:
    found = []
    for v, value in enumerate(simulator.problem.values):
        begin, end = int(batch.begins[v, 0]), int(batch.ends[v, 0])
        if value.nbytes and value.is_output:
            found.append(_buffer(value, "output"))
        elif value.nbytes and batch.used[v, 0] and slot <= end:
            found.append(_buffer(value, "saved"))
        if value.held_bytes and batch.recomputed[v, 0] and slot <= batch.slots[v, 0]:
            found.append(replace(_buffer(value, "copies of inputs"), nbytes=value.held_bytes))
        if batch.buffers[v, 0] and begin <= slot <= end:
            found.append(_buffer(value, "recomputed"))
    return found


def _others_at(simulator: Simulator, batch: Batch, slot: int) -> list[LiveBuffer]:
    """What is as large as a value and lives because of it."""
    found, values = [], simulator.problem.values
    for v, last in simulator.incoming:
        if batch.used[v, 0] and slot <= batch.step_slots[0, last]:
            found.append(_buffer(values[v], "gradient that comes in"))
    for w, v in simulator.copied:
        if batch.recomputed[v, 0] and batch.recomputed[w, 0] and batch.slots[v, 0] == slot:
            found.append(_buffer(values[v], "copies of inputs"))
    return found


def _steps_at(simulator: Simulator, batch: Batch, slot: int) -> list[LiveBuffer]:
    found = []
    for b, step in enumerate(simulator.problem.steps):
        last = int(simulator.lifetimes.step_last[b])
        end = (
            int(NEVER)
            if last >= simulator.num_steps
            else int(batch.step_slots[0, last] - simulator.lifetimes.step_in_place[b])
        )
        if step.held_bytes and slot <= batch.step_slots[0, b]:
            found.append(replace(_buffer(step, "copies of inputs"), nbytes=step.held_bytes))
        if simulator.lifetimes.step_bytes[b] and batch.step_slots[0, simulator.step_item_of[b]] <= slot <= end:
            found.append(_buffer(step, "gradient" if step.is_output else "temporary"))
    return found


def _buffer(node: object, role: str) -> LiveBuffer:
    origin = node.origin  # type: ignore[attr-defined]
    return LiveBuffer(
        node.name,  # type: ignore[attr-defined]
        node.nbytes,  # type: ignore[attr-defined]
        origin.shape,
        origin.dtype,
        origin.module_path,
        origin.source_line,
        role,
    )
