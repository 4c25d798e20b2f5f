"""Live bytes over a training step, column by column, and the buffers that make up these bytes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from compile_remat.pages.figures import Curve, Kind, StepFigures, Tensor
from compile_remat.passes.memory.buffers import Ints
from compile_remat.passes.memory.candidate_plan import Candidate
from compile_remat.passes.memory.on_host import live_on_device
from compile_remat.passes.memory.plan_spans import (
    COPIES,
    GRADIENT,
    INCOMING,
    OUTPUT,
    RECOMPUTED,
    SAVED,
    Span,
    backward_spans,
    forward_spans,
)
from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.duplication import SUFFIX
from compile_remat.passes.problem.facts import Levels
from compile_remat.passes.problem.plan import Offloaded
from compile_remat.passes.problem.problem import Step, Value

FORWARD_END = "end of the forward"

KINDS = {
    SAVED: Kind.SAVED,
    RECOMPUTED: Kind.RECOMPUTED,
    OUTPUT: Kind.OUTPUT,
    GRADIENT: Kind.GRADIENT,
    INCOMING: Kind.GRADIENT,
}
"""The kind of each role of a buffer; buffers of any other role are temporary."""


def figures_of_step(
    found: Candidate, other: tuple[str, Levels, Levels] | None = None, offloaded: Sequence[Offloaded] = ()
) -> StepFigures:
    """The figures of a plan's training step.

    Args:
        found: The simulated plan, with all values kept.
        other: The plan to compare with: a label, and the live bytes of forward and backward.
        offloaded: The saved values that the plan moves to the host.

    Raises:
        ValueError: See `live_on_device`.
    """
    simulator, batch = found.simulator, found.batch
    forward, live = simulator.forward, live_on_device(found, offloaded)
    spans = forward_spans(simulator, batch)
    places = _shown(simulator, live.forward)
    of_place = np.searchsorted(places, np.arange(forward.size + 1))  # the column of a place, or the next one
    last_slot = int(batch.step_slots[0, -1])
    in_backward = backward_spans(simulator, batch)
    names = [*(v.name for v in simulator.problem.values), FORWARD_END]
    columns = [names[place] for place in places] + _backward_names(found)
    levels = np.concatenate([live.forward[places], live.backward])
    stops = of_place[[min(s.end + 1, forward.size) for s in spans]] - [s.end < forward.size for s in spans]
    recomputed = np.flatnonzero(batch.recomputed[:, 0])
    tensors = _tensors(
        [(s, int(of_place[s.begin]), int(stop)) for s, stop in zip(spans, stops, strict=True)],
        [(s, len(places) + s.begin, len(places) + min(s.end, last_slot)) for s in in_backward],
        frozenset(simulator.problem.values[v].name for v in recomputed),
        {each.name: (int(of_place[each.release]) - 1, len(places) + each.fetch) for each in live.absent},
    )
    nodes: tuple[Value | Step, ...] = (*simulator.problem.values, *simulator.problem.steps)
    times_ns = {node.name: node.time_ns for node in nodes}
    return StepFigures(
        tuple(columns),
        len(places),
        _areas(levels, tensors),
        tensors,
        tuple(times_ns.get(name, 0) for name in columns),
        None if other is None else _curve(other, columns, len(places)),
    )


def _shown(simulator: Simulator, live: Ints) -> list[int]:
    """The places of the forward that have a column: a value is computed there, or the live bytes change."""
    values = simulator.problem.values
    changes = np.flatnonzero(np.diff(live, prepend=0))
    return sorted({*(v for v, value in enumerate(values) if value.in_forward), *changes.tolist(), len(values)})


def _backward_names(found: Candidate) -> list[str]:
    simulator, batch = found.simulator, found.batch
    names = [""] * (int(batch.step_slots[0, -1]) + 1)
    for v in np.flatnonzero(batch.recomputed[:, 0]):
        names[batch.slots[v, 0]] = simulator.problem.values[v].name
    for step, slot in zip(simulator.problem.steps, batch.step_slots[0], strict=True):
        names[slot] = step.name
    return names


def _tensors(
    forward: Iterable[tuple[Span, int, int]],
    backward: Iterable[tuple[Span, int, int]],
    recomputed: frozenset[str],
    absent: Mapping[str, tuple[int, int]],
) -> tuple[Tensor, ...]:
    """Buffers with their columns; a buffer that the forward hands to the backward is one tensor, but two if it leaves in between.

    Args:
        absent: For each saved value that waits on the host, its last column before, and its first one after.
    """
    leaves = {(name, SAVED): columns for name, columns in absent.items()}
    forward = [(s, begin, leaves.get((s.node.name, s.role), (end, 0))[0]) for s, begin, end in forward]
    backward = [(s, leaves.get((s.node.name, s.role), (0, begin))[1], end) for s, begin, end in backward]
    handed = [each for each in forward if (each[0].node.name, each[0].role) not in leaves]
    begins = {(s.node.name, s.role): begin for s, begin, _ in handed if s.role in (SAVED, OUTPUT, COPIES)}
    made = [_tensor(s, begins.pop((s.node.name, s.role), begin), end, recomputed, absent) for s, begin, end in backward]
    made += [
        _tensor(s, begin, end, recomputed, absent)
        for s, begin, end in forward
        if s.role not in (SAVED, OUTPUT, COPIES) or (s.node.name, s.role) in begins.keys() | leaves.keys()
    ]
    return tuple(sorted((t for t in made if t.begin <= t.end), key=lambda t: (t.begin, -t.nbytes, t.name)))


def _tensor(span: Span, begin: int, end: int, recomputed: frozenset[str], absent: Container[str]) -> Tensor:
    origin = span.node.origin
    return Tensor(
        span.node.name.removesuffix(SUFFIX),
        span.nbytes,
        KINDS.get(span.role, Kind.TEMPORARY),
        begin,
        end,
        _fate(span, recomputed, absent),
        origin.shape,
        origin.dtype,
        origin.module_path,
        origin.source_line,
    )


def _fate(span: Span, recomputed: frozenset[str], absent: Container[str]) -> str:
    """Describes the use of a buffer in words that need no other context."""
    fates = {
        SAVED: "saved for the backward",
        RECOMPUTED: "computed again in the backward",
        OUTPUT: "output of the forward",
        GRADIENT: "gradient that the backward returns",
        INCOMING: "gradient that comes in, as large as this output",
        COPIES: "copy that a kernel needs of its input",
    }
    if span.role == RECOMPUTED and span.node.name.endswith(SUFFIX):
        return "computed a third time"
    if span.role == SAVED and span.node.name in absent:
        return "saved for the backward, on the host in between"
    if span.role in fates:
        return fates[span.role]
    return (
        "freed, and computed again in the backward" if span.node.name in recomputed else "freed after its last reader"
    )


def _areas(levels: Ints, tensors: Sequence[Tensor]) -> dict[Kind, tuple[int, ...]]:
    """Live bytes by kind; bytes that no tensor accounts for are workspace of kernels, which is temporary."""
    deltas = {kind: np.zeros(len(levels) + 1, dtype=np.int64) for kind in Kind}
    for tensor in tensors:
        deltas[tensor.kind][tensor.begin] += tensor.nbytes
        deltas[tensor.kind][tensor.end + 1] -= tensor.nbytes
    areas = {kind: np.cumsum(delta)[:-1] for kind, delta in deltas.items()}
    areas[Kind.TEMPORARY] = areas[Kind.TEMPORARY] + levels - sum(areas.values())
    return {kind: tuple(int(nbytes) for nbytes in area) for kind, area in areas.items()}


def _curve(other: tuple[str, Levels, Levels], columns: Sequence[str], num_forward: int) -> Curve:
    label, forward, backward = other
    return Curve(label, (*aligned(forward, columns[:num_forward]), *aligned(backward, columns[num_forward:])))


def aligned(levels: Levels, columns: Sequence[str]) -> list[int]:
    """Maps the levels of one plan to the columns of another: the most live bytes of a column's nodes, or the level before them.

    Nodes are matched by name.  A node that `columns` lacks, or has at an earlier column, joins the column of the node before it.
    """
    places: Mapping[str, int] = {name: place for place, name in enumerate(columns)}
    most: dict[int, int] = {}
    last: dict[int, int] = {}
    at = 0
    for name, level in levels:
        at = max(at, places.get(name, at))
        most[at], last[at] = max(most.get(at, 0), level), level
    found, before = [], levels[0][1] if levels else 0
    for place in range(len(columns)):
        found.append(most.get(place, before))
        before = last.get(place, before)
    return found
