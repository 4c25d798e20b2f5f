"""A lower bound on the time of every plan within a budget, from the memory at many points of the step at once.

The cut's bound (`min_cut.lower_bound_ns`) enforces the budget at one point: the begin of the backward, when all saved values are
alive.  The linear programme here enforces the budget at points all over forward and backward.  At each point it counts the
buffers that live there in every plan (gradients, temporaries, values read before and after) and saved values still to be read.

Variables, each in [0, 1]: `a` available in the backward, `r` recomputed there, so `a - r` saved, and `late` for a saved value
that some value recomputed after the point will read.  Every plan is a feasible solution, so the minimum is a bound (`programme`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.recompute_schedule import NEVER
from compile_remat.passes.memory.simulator import Bools, Ints, Simulator
from compile_remat.passes.search.bounds.programme import Away, Programme, Solution
from compile_remat.passes.search.options import DEFAULT, SearchOptions


@dataclass(frozen=True)
class BudgetPoint:
    """A place of forward or backward at which the budget is enforced.

    Attributes:
        fixed_bytes: Bytes live there in every plan.
        held: Mask of the values that are alive there if they are saved, [values].
        late: Pairs (value, reader): the value is alive there if the value is saved and the reader recomputed.
    """

    fixed_bytes: int
    held: Bools
    late: tuple[tuple[int, int], ...] = ()


class LpBound:
    """The programme of one problem; only the budget changes between bounds.

    Args:
        once: True for a bound of the plans that compute no value twice in the backward; False for a bound of all plans.
        away: Bytes that may be on the host, see `Programme`.
    """

    def __init__(
        self,
        simulator: Simulator,
        options: SearchOptions = DEFAULT,
        *,
        once: bool = True,
        away: Sequence[Away] = (),
    ) -> None:
        in_backward = _in_backward(simulator, options, once=once)
        self.points = [at_the_begin(simulator), *_in_forward(simulator, options), *in_backward]
        self.programme = _with_points(simulator, self.points, away)
        self._solutions: dict[int, Solution] = {}

    def least_time_ns(self, budget_bytes: int, anchors: Sequence[int] = ()) -> int:
        """Time (recomputed work and the traffic of saving) that no plan within the budget goes below.

        Args:
            anchors: If any, the programme is solved at the nearest of these budgets instead.  The multipliers of one budget prove
                a bound at every budget; at a near budget, this bound is little below the best bound.
        """
        anchor = min(anchors, key=lambda b: abs(b - budget_bytes), default=budget_bytes)
        return max(0, self.programme.proven_ns(self.solution(anchor).multipliers, budget_bytes))

    def solution(self, budget_bytes: int) -> Solution:
        """The solver's solution at this budget, computed once."""
        if budget_bytes not in self._solutions:
            self._solutions[budget_bytes] = self.programme.solve(budget_bytes)
        return self._solutions[budget_bytes]


def _with_points(simulator: Simulator, points: Sequence[BudgetPoint], away: Sequence[Away]) -> Programme:
    """The programme in which a saved value counts at each point that holds it, or where its reader is recomputed later."""
    programme = Programme(simulator, away)
    n, nbytes = programme.num_values, simulator.saved_nbytes.tolist()
    pairs = dict.fromkeys((k, v) for k, point in enumerate(points) for v, _ in point.late)
    first = programme.variables(len(pairs))
    number = {pair: first + i for i, pair in enumerate(pairs)}
    for k, point in enumerate(points):
        for v, w in point.late:
            programme.at_most([(n + w, 1), (n + v, -1), (number[k, v], -1)])
    for k, point in enumerate(points):
        held = np.flatnonzero(point.held & (simulator.saved_nbytes > 0)).tolist()
        entries = [entry for v in held for entry in programme.saved(v, nbytes[v])]
        entries += [(number[k, v], nbytes[v]) for v in dict.fromkeys(v for v, _ in point.late)]
        programme.point(entries, point.fixed_bytes)
    return programme


def _in_forward(simulator: Simulator, options: SearchOptions) -> list[BudgetPoint]:
    """Points of the forward, each with the bytes live there in every plan, and the values that cost bytes there if saved."""
    tops, order = simulator.forward.tops, simulator.forward.order
    points = []
    for window in np.array_split(np.arange(len(order)), min(options.bound_forward_points, max(1, len(order)))):
        if len(window):
            place = int(window[np.argmax(tops[window])])
            held = np.zeros(simulator.num_values, dtype=bool)
            held[order[: place + 1]] = True
            points.append(BudgetPoint(int(tops[place]), held))
    return points


def at_the_begin(simulator: Simulator) -> BudgetPoint:
    """The point of the first kernel of the backward, when all saved values are alive.

    A first step that reads no value is this kernel in every plan, so the step's output is alive there too.
    """
    fixed = simulator.output_bytes + int(simulator.step_held.sum())
    if not simulator.problem.steps[0].reads:
        fixed += int(simulator.lifetimes.step_bytes[0])
    return BudgetPoint(fixed, np.ones(simulator.num_values, dtype=bool))


def _in_backward(simulator: Simulator, options: SearchOptions, *, once: bool) -> list[BudgetPoint]:
    """Points at which steps run: in each window of steps, the step with the most bytes live in every plan."""
    spans = _between_steps(simulator) if once else read_spans(simulator)
    always = gradient_bytes(simulator) + bytes_of(spans, simulator)
    last, earliest = last_steps(simulator), simulator.schedules.earliest
    points = []
    for window in np.array_split(
        np.arange(simulator.num_steps), min(options.bound_backward_points, simulator.num_steps)
    ):
        b = int(window[np.argmax(always[window])])
        ahead = last >= b
        held = ahead.copy()
        held[spans.values[(spans.first <= b) & (b <= spans.last)]] = False
        points.append(BudgetPoint(int(always[b]), held, _late_pairs(simulator, b, ahead, earliest)))
    return points


@dataclass(frozen=True)
class Spans:
    """Runs of steps, from `first` to `last` inclusive, at which values have a buffer in every plan: three arrays, [spans].

    The spans of one value do not overlap.
    """

    values: Ints
    first: Ints
    last: Ints


def _between_steps(simulator: Simulator) -> Spans:
    """Spans from the first step that reads a value to the last: a value lives there unless the backward computes it twice."""
    first, last = _first_step(simulator), last_steps(simulator)
    found = np.flatnonzero(surely_buffers(simulator) & (first <= last))
    return Spans(found, first[found], last[found])


def read_spans(simulator: Simulator) -> Spans:
    """Spans at which a step reads a value: the value is alive until the step's kernel runs, however often it is computed."""
    model, is_buffer = simulator.lifetimes, surely_buffers(simulator)
    overwritten = {(v, b) for b, sources in model.step_in_place_sources for v in sources}
    found: dict[int, list[tuple[int, int]]] = {}
    for b, step in enumerate(simulator.problem.steps):
        for v in dict.fromkeys(step.reads):
            last = int(model.step_end[b]) - ((v, model.step_end[b]) in overwritten)
            if not is_buffer[v] or last < b:
                continue
            spans = found.setdefault(v, [])
            if spans and b <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], last)
            else:
                spans.append((b, last))
    rows = [(v, first, last) for v, spans in found.items() for first, last in spans]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Spans(table[:, 0], table[:, 1], table[:, 2])


def bytes_of(spans: Spans, simulator: Simulator) -> Ints:
    """Bytes of the spans' values while each step runs, [steps]."""
    delta = np.zeros(simulator.num_steps + 1, dtype=np.int64)
    np.add.at(delta, spans.first, simulator.saved_nbytes[spans.values])
    np.add.at(delta, np.minimum(spans.last + 1, simulator.num_steps), -simulator.saved_nbytes[spans.values])
    return np.asarray(np.cumsum(delta)[:-1])


def surely_buffers(simulator: Simulator) -> Bools:
    """Mask of the values with a buffer of their own in every plan that recomputes them, outputs excluded, [values]."""
    model = simulator.lifetimes
    found = (simulator.saved_nbytes > 0) & model.always_stored
    found[[v for _, parts in model.parts for v in parts]] = False  # parts may lie inside of a concatenation
    return np.asarray(found)


def gradient_bytes(simulator: Simulator) -> Ints:
    """Bytes of outputs, gradients, copies of inputs and temporaries while each step runs, [steps]."""
    m = simulator.num_steps
    delta = np.zeros(m + 2, dtype=np.int64)
    delta[0] = simulator.step_held.sum()
    np.subtract.at(delta, np.array(simulator.lifetimes.step_end, dtype=np.int64) + 1, simulator.step_held)
    np.add.at(delta, simulator.step_item_of, simulator.lifetimes.step_bytes)
    ends = np.minimum(simulator.lifetimes.step_last + 1 - simulator.lifetimes.step_in_place, m + 1)
    np.add.at(delta, ends, -simulator.lifetimes.step_bytes)
    return np.asarray(np.cumsum(delta)[:m] + simulator.step_transient + simulator.output_bytes)


def last_steps(simulator: Simulator) -> Ints:
    """The last step that reads each value and does not reuse its buffer in place, [values]; -1 if there is none."""
    last = simulator.lifetimes.last_step.astype(np.int64)
    for b, sources in simulator.lifetimes.step_in_place_sources:
        last[[v for v in sources if simulator.lifetimes.last_step[v] == b]] = b - 1
    return last


def _first_step(simulator: Simulator) -> Ints:
    """The first step that reads each value, [values]; the number of steps if no step reads the value."""
    return np.searchsorted(simulator.schedules.step_anchor, simulator.schedules.first_anchor)


def _late_pairs(simulator: Simulator, b: int, known: Bools, earliest: Ints) -> tuple[tuple[int, int], ...]:
    """Pairs of a value not `known` to be alive at step `b`, and a reader that plans recompute after the step if at all."""
    anchor = int(simulator.schedules.step_anchor[b])
    is_late = (earliest > anchor) & (earliest < NEVER)
    open_values = np.flatnonzero(~known & (simulator.saved_nbytes > 0)).tolist()
    return tuple((v, w) for v in open_values for w in simulator.readers[v] if is_late[w])
