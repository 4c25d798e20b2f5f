"""The exact timeline of one plan: live bytes at each node of the backward, the peaks, and the largest buffers at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat.passes.memory.candidate_plan import Candidate, candidate
from compile_remat.passes.memory.plan_spans import Span, backward_spans
from compile_remat.passes.memory.simulator import Batch, Bools, Simulator
from compile_remat.passes.problem.plan import Plan
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.problem.tags import obeying


@dataclass(frozen=True)
class Timeline:
    """Live bytes of one plan.

    Attributes:
        kernels: Names of the nodes that run in the backward, in order: recomputed values and steps.
        live_bytes: Live bytes while each of these nodes runs.
        forward_peak_bytes: The most bytes live at once in the forward.
        peak_bytes: The most bytes live at once in forward and backward.
        largest: The largest buffers at the backward's peak, largest first.
    """

    kernels: tuple[str, ...]
    live_bytes: tuple[int, ...]
    forward_peak_bytes: int
    peak_bytes: int
    largest: tuple[LiveBuffer, ...]


def timeline(problem: Problem, plan: Plan) -> Timeline:
    """Timeline of `plan` on `problem`; ValueError if the plan saves a value that the problem lacks or that cannot be saved."""
    found = candidate_of(problem, plan.saved, plan.again)
    return timeline_of(found.simulator, found.saved)


def peak_bytes_of(problem: Problem, saved: Sequence[str], again: Sequence[str] = ()) -> int:
    """Peak bytes of the plan that saves the values in `saved` and computes those in `again` twice; ValueError as in `timeline`."""
    return candidate_of(problem, saved, again).peak_bytes


def candidate_of(problem: Problem, names: Sequence[str], again: Sequence[str]) -> Candidate:
    """Simulates the plan that saves the named values and computes those in `again` twice; ValueError as in `timeline`.

    The user's tags pin nothing here: the plan may have set some of them aside.
    """
    problem = obeying(problem, ())
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
    """Timeline of the plan that saves the values in `saved`, bool [values], with the `keep` largest buffers."""
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
    return [_buffer(span) for span in backward_spans(simulator, batch) if span.begin <= slot <= span.end]


def _buffer(span: Span) -> LiveBuffer:
    origin = span.node.origin
    return LiveBuffer(
        span.node.name,
        span.nbytes,
        origin.shape,
        origin.dtype,
        origin.module_path,
        origin.source_line,
        span.role,
    )
