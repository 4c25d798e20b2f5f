"""The step of one plan along time: live bytes and start of each kernel, and the saved buffers that could leave in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.buffers import Ints
from compile_remat.passes.memory.candidate_plan import Candidate
from compile_remat.passes.memory.forward import Forward
from compile_remat.passes.memory.plan_spans import SAVED, forward_spans


@dataclass(frozen=True)
class Movable:
    """A saved value in a buffer of its own, which the forward computes and does not return.

    Attributes:
        made: The place in the forward whose kernel completes the buffer.
        last_read: The last place in the forward whose kernel reads or writes the buffer.
        first_read: The slot in the backward whose kernel is the first to read the buffer.
    """

    value: int
    name: str
    nbytes: int
    made: int
    last_read: int
    first_read: int


@dataclass(frozen=True)
class StepCurve:
    """Forward and backward of one plan; a place is a value's index in the forward, a slot is a kernel's number in the backward.

    Attributes:
        forward_live: Live bytes at each place, and at the forward's end, [places + 1].
        forward_starts_ns: The time at which each place's kernel starts, and the forward's end, [places + 1].
        places: Names of the nodes at the places; empty for a node that the forward does not compute.
        backward_live: Live bytes at each slot, [slots].
        backward_starts_ns: The time at which each slot's kernel starts, and the backward's end, [slots + 1].
        slots: Names of the nodes at the slots.
        movable: The saved buffers, in the order in which the forward completes them.
    """

    forward_live: Ints
    forward_starts_ns: Ints
    places: tuple[str, ...]
    backward_live: Ints
    backward_starts_ns: Ints
    slots: tuple[str, ...]
    movable: tuple[Movable, ...]


def curve_of(found: Candidate) -> StepCurve:
    """The curve of a plan that computes no value more than twice."""
    simulator, batch = found.simulator, found.batch
    values, steps = simulator.problem.values, simulator.problem.steps
    used, recomputed = batch.used[:, 0], batch.recomputed[:, 0]
    lifetimes = simulator.forward.lifetimes(batch.used, batch.recomputed)
    saving = np.where(used, simulator.save_time_ns, 0)
    is_run = np.array([value.in_forward and not value.is_snapshot for value in values], dtype=bool)
    names = [""] * (int(batch.step_slots[0, -1]) + 1)
    times_ns = np.zeros(len(names), dtype=np.int64)
    for v in np.flatnonzero(recomputed).tolist():
        names[batch.slots[v, 0]], times_ns[batch.slots[v, 0]] = values[v].name, values[v].time_ns
    for step, slot in zip(steps, batch.step_slots[0].tolist(), strict=True):
        names[slot], times_ns[slot] = step.name, step.time_ns
    return StepCurve(
        forward_live=simulator.forward.live(lifetimes)[0],
        forward_starts_ns=_starts(np.where(is_run, simulator.time_ns, 0) + saving),
        places=tuple(value.name if runs else "" for value, runs in zip(values, is_run.tolist(), strict=True)),
        backward_live=batch.live[0, : len(names)],
        backward_starts_ns=_starts(times_ns),
        slots=tuple(names),
        movable=tuple(sorted(_movable(found), key=lambda each: (each.made, each.value))),
    )


def _starts(times_ns: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(times_ns)])


def _movable(found: Candidate) -> Iterator[Movable]:
    simulator, batch = found.simulator, found.batch
    values = simulator.problem.values
    index = {id(value): v for v, value in enumerate(values)}
    spans = {index[id(span.node)]: span for span in forward_spans(simulator, batch)}
    late = _read_at_the_end(found)
    for v, span in spans.items():
        is_own = span.role == SAVED and span.nbytes == values[v].nbytes and values[v].in_forward
        if not is_own or values[v].is_snapshot or not batch.used[v, 0]:
            continue
        reads = [int(batch.slots[w, 0]) for w in simulator.readers[v] if batch.recomputed[w, 0]]
        reads += [int(batch.step_slots[0, b]) for b in simulator.lifetimes.reading_steps[v]]
        made = max(v, span.begin)
        if made < len(values) and reads:
            readers = _readers(simulator.forward, v)
            ends = [max(w, spans[w].begin) if batch.used[w, 0] and w in spans else w for w in readers]
            last_read = len(values) - 1 if v in late else min(max([made, *ends]), len(values) - 1)
            yield Movable(v, values[v].name, values[v].nbytes, made, last_read, min(reads))


def _readers(forward: Forward, v: int) -> set[int]:
    """The values whose kernels may read a saved value's buffer in the forward, directly or through values in registers."""
    found, pending = set[int](), [v]
    while pending:
        for w in forward.readers[pending.pop()]:
            if w not in found:
                found.add(w)
                pending += [] if forward.runs_once(w) else [w]
    return found


def _read_at_the_end(found: Candidate) -> set[int]:
    """Values that the forward reads at its end, to compute saved values which the backward alone needs."""
    used, values = found.batch.used[:, 0], found.simulator.problem.values
    seen, pending = set[int](), [v for v in np.flatnonzero(used).tolist() if not values[v].in_forward]
    while pending:
        for w in set(values[pending.pop()].reads) - seen:
            seen.add(w)
            if not used[w] and not (values[w].in_forward and found.simulator.forward.runs_once(w)):
                pending.append(w)
    return seen
