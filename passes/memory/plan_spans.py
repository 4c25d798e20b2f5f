"""The buffers of one plan with their live ranges: the terms of the simulator's sums, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compile_remat.passes.memory.recompute_schedule import NEVER
from compile_remat.passes.memory.simulator import Batch, Simulator
from compile_remat.passes.problem.problem import Step, Value

SAVED, RECOMPUTED, OUTPUT, GRADIENT, TEMPORARY = "saved", "recomputed", "output", "gradient", "temporary"
COPIES, INCOMING = "copies of inputs", "gradient that comes in"


@dataclass(frozen=True)
class Span:
    """One buffer of a graph.

    Attributes:
        node: The value or the step in the buffer.
        role: The reason that the buffer is live, as in `LiveBuffer`.
        begin, end: The first and the last place at which the buffer counts: a value's index in the forward, a slot in the
            backward.  A buffer that is never freed ends at NEVER.
    """

    node: Value | Step
    nbytes: int
    role: str
    begin: int
    end: int


def backward_spans(simulator: Simulator, batch: Batch) -> list[Span]:
    """Buffers in the backward of a batch of one plan, without workspaces and unread outputs of kernels."""
    spans = [*_of_values(simulator, batch), *_of_others(simulator, batch), *_of_steps(simulator, batch)]
    return [span for span in spans if span.nbytes]


def _of_values(simulator: Simulator, batch: Batch) -> Iterator[Span]:
    held = dict(zip(simulator.lifetimes.held.tolist(), batch.held_until[:, 0].tolist(), strict=True))
    for v, value in enumerate(simulator.problem.values):
        end = int(batch.ends[v, 0])
        if value.is_output:
            yield Span(value, value.nbytes, OUTPUT, 0, int(NEVER))
        elif batch.used[v, 0]:
            yield Span(value, value.nbytes, SAVED, 0, end)
        if batch.recomputed[v, 0] and v in held:
            yield Span(value, value.held_bytes, COPIES, 0, held[v])
        if batch.buffers[v, 0]:
            yield Span(value, value.nbytes, RECOMPUTED, int(batch.begins[v, 0]), end)


def _of_others(simulator: Simulator, batch: Batch) -> Iterator[Span]:
    """Buffers as large as a value: the gradients that come in for outputs, and copies of concatenations."""
    values = simulator.problem.values
    for v, last in simulator.incoming:
        if batch.used[v, 0]:
            yield Span(values[v], values[v].nbytes, INCOMING, 0, int(batch.step_slots[0, last]))
    for w, at in batch.copied:
        if at[0] >= 0:
            yield Span(values[w], values[w].nbytes, COPIES, int(at[0]), int(at[0]))


def _of_steps(simulator: Simulator, batch: Batch) -> Iterator[Span]:
    model = simulator.lifetimes
    for b, step in enumerate(simulator.problem.steps):
        yield Span(step, step.held_bytes, COPIES, 0, int(batch.step_slots[0, model.step_end[b]]))
        if model.step_bytes[b]:
            last = int(model.step_last[b])
            is_kept = last >= simulator.num_steps
            end = int(NEVER) if is_kept else int(batch.step_slots[0, last] - model.step_in_place[b])
            role = GRADIENT if step.is_output else TEMPORARY
            yield Span(step, step.nbytes, role, int(batch.step_slots[0, simulator.step_item_of[b]]), end)


def forward_spans(simulator: Simulator, batch: Batch) -> list[Span]:
    """Buffers in the forward of a batch of one plan, without workspaces and unread outputs of kernels."""
    forward, values = simulator.forward, simulator.problem.values
    if not values:
        return []
    found = forward.lifetimes(batch.used, batch.recomputed)
    beside = {v: source.value for source, waits in found.beside if not waits[0] for v in source.written_with}
    spans: list[Span] = []
    for v, value in enumerate(values):
        is_saved = bool(found.saved[v, 0]) and not value.is_output
        if v in forward.joined_at and not found.saved[v, 0]:
            continue  # this part lies in a concatenation's buffer
        if forward.stored[v]:
            stop = int(found.stops[v, 0])
            role = OUTPUT if value.is_output else SAVED if stop > forward.size else TEMPORARY
            end = int(NEVER) if stop > forward.size else stop - 1
            spans.append(Span(value, value.nbytes, role, int(forward.begin[v]), end))
        elif is_saved:
            spans.append(Span(value, value.nbytes, SAVED, beside.get(v, int(forward.begins_if_saved[v])), int(NEVER)))
    for v, stop in zip(forward.held.tolist(), found.copy_stops[:, 0].tolist(), strict=True):
        spans.append(Span(values[v], values[v].held_bytes, COPIES, 0, int(NEVER) if stop > forward.size else stop - 1))
    return [span for span in spans if span.nbytes]
