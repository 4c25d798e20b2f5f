"""A lower bound on the time of every plan within a budget, from many points of the step at once.

The cut's bound (`min_cut.lower_bound_ns`) holds the budget at one point: the begin of the backward, when all saved values are
alive.  The linear programme here holds it at points all over forward and backward, each with the buffers that live then in
every plan: gradients and temporaries, values read both before and after, and the saved values that are still to be read.

Variables, each in [0, 1]: `a` available in the backward, `r` recomputed there, so `a - r` saved, and `late` for a saved value
that some value recomputed after the point will read.  Every plan is a feasible solution, so the minimum is a bound.
The solver's answer is only trusted for its multipliers: any multipliers prove what they come to over the box of the variables
(Neumaier and Shcherbina, Safe bounds in linear and mixed-integer linear programming, 2004), which is worked out here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from compile_remat.passes.memory.recompute_schedule import NEVER
from compile_remat.passes.memory.simulator import Bools, Floats, Ints, Simulator
from compile_remat.passes.problem.problem import SAVE
from compile_remat.passes.search.options import DEFAULT, SearchOptions


@dataclass(frozen=True)
class BudgetPoint:
    """A place of forward or backward.

    Attributes:
        fixed_bytes: Live in every plan.
        held: Values alive there if they are saved.
        late: Pairs (value, reader): the value is alive there if it is saved and its reader recomputed.
    """

    fixed_bytes: int
    held: Bools
    late: tuple[tuple[int, int], ...] = ()


class LpBound:
    """The programme of one problem; only the budget changes between bounds."""

    def __init__(self, simulator: Simulator, options: SearchOptions = DEFAULT) -> None:
        self.simulator = simulator
        self.points = [at_the_begin(simulator), *_in_forward(simulator, options), *_in_backward(simulator, options)]
        self._build()
        self._multipliers: dict[int, Floats] = {}

    def least_time_ns(self, budget_bytes: int, anchors: Sequence[int] = ()) -> int:
        """Time (recomputed work and the traffic of saving) that no plan within the budget goes below.

        Args:
            anchors: Where there are any, the programme is solved at the nearest of these budgets.  What its multipliers prove at
                one holds at every budget, and is little below the best at one that lies near.
        """
        anchor = min(anchors, key=lambda b: abs(b - budget_bytes), default=budget_bytes)
        if anchor not in self._multipliers:
            self._multipliers[anchor] = self._multipliers_at(anchor)
        limits = self._limits(budget_bytes)
        return max(0, _proven_ns(self._multipliers[anchor], self.matrix, limits, self.cost, self.box))

    def _multipliers_at(self, budget_bytes: int) -> Floats:
        """Of the rules in ns, of the points in ns for each byte; zeros, which prove nothing, where there is no point."""
        unit = max(1.0, float(self.cost.max(initial=0.0)))
        limits = self._limits(budget_bytes)
        scales = np.where(np.arange(len(limits)) >= self.num_rules, max(1.0, float(budget_bytes)), 1.0)
        matrix = scipy.sparse.csr_array((self.weights / scales[self.rows], (self.rows, self.columns)))
        found = scipy.optimize.linprog(
            self.cost / unit, A_ub=matrix, b_ub=limits / scales, bounds=self.box, method="highs-ds"
        )
        if found.status != 0:  # below the lowest peak
            return np.zeros(len(limits))
        return np.asarray(np.maximum(0.0, -found.ineqlin.marginals) * unit / scales)

    def _limits(self, budget_bytes: int) -> Floats:
        """The right-hand side: of the rules 0, of the points the bytes that are left there."""
        left = [budget_bytes - m.fixed_bytes for m in self.points]
        return np.concatenate([np.zeros(self.num_rules), np.array(left, dtype=np.float64)])

    def _build(self) -> None:
        simulator, values = self.simulator, self.simulator.problem.values
        n = len(values)
        available, recomputed = np.arange(n), n + np.arange(n)
        rules = [(n + w, v) for w in range(n) for v in values[w].reads] + list(zip(recomputed, available, strict=True))
        rules += [(v, n + v) for v in range(n) if not values[v].is_saveable]  # available only by being recomputed
        entries = [
            (row, column, sign) for row, pair in enumerate(rules) for column, sign in zip(pair, (1, -1), strict=True)
        ]
        late = [(k, v, w) for k, m in enumerate(self.points) for v, w in m.late]
        number = {pair: 2 * n + i for i, pair in enumerate(dict.fromkeys((k, v) for k, v, _ in late))}
        for row, (k, v, w) in enumerate(late, start=len(rules)):
            entries += [(row, n + w, 1), (row, n + v, -1), (row, number[k, v], -1)]
        self.num_rules = len(rules) + len(late)
        for k, point in enumerate(self.points):
            row = self.num_rules + k
            for v in np.flatnonzero(point.held & (simulator.saved_nbytes > 0)).tolist():
                nbytes = int(simulator.saved_nbytes[v])
                entries += [(row, v, nbytes), (row, n + v, -nbytes)]
            entries += [(row, number[key], int(simulator.saved_nbytes[key[1]])) for key in number if key[0] == k]
            entries.append((row, 0, 0))  # the matrix has all its rows
        table = np.array(entries, dtype=np.int64).reshape(-1, 3)
        self.rows, self.columns, self.weights = table[:, 0], table[:, 1], table[:, 2].astype(np.float64)
        size = 2 * n + len(number)
        self.cost = np.zeros(size)
        self.cost[:n] = simulator.save_time_ns
        self.cost[n : 2 * n] = simulator.time_ns - simulator.save_time_ns
        self.box = np.zeros((size, 2))
        self.box[:, 1] = 1.0
        self.box[sorted({v for s in simulator.problem.steps for v in s.reads}), 0] = 1.0
        self.box[[n + v for v in range(n) if values[v].pin == SAVE and values[v].is_saveable], 1] = 0.0
        if len(table) == 0 or int(self.columns.max()) < size - 1:
            self.rows, self.columns, self.weights = (
                np.append(self.rows, 0),
                np.append(self.columns, size - 1),
                np.append(self.weights, 0.0),
            )
        self.matrix = scipy.sparse.csr_array((self.weights, (self.rows, self.columns)))


def _proven_ns(multipliers: Floats, matrix: scipy.sparse.csr_array, right: Floats, cost: Floats, box: Floats) -> int:
    """What the multipliers prove over the box, rounded up because times are whole; the slack covers the arithmetic of floats."""
    reduced = cost + matrix.T @ multipliers
    terms = np.where(reduced > 0, reduced * box[:, 0], reduced * box[:, 1])
    charges = multipliers * right
    size = np.abs(terms).sum() + np.abs(charges).sum() + np.abs(cost).sum() + (abs(matrix).T @ multipliers).sum()
    return math.ceil(float(terms.sum() - charges.sum()) - 1e-6 - 1e-11 * float(size))


def _in_forward(simulator: Simulator, options: SearchOptions) -> list[BudgetPoint]:
    """Places of the forward, with what is saved before them beside what lives there anyway."""
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
    """The first kernel of the backward, when all that is saved is alive.

    A first step that reads no value is that kernel in every plan, and what it writes is alive too.
    """
    fixed = simulator.output_bytes
    if not simulator.problem.steps[0].reads:
        fixed += int(simulator.lifetimes.step_bytes[0])
    return BudgetPoint(fixed, np.ones(simulator.num_values, dtype=bool))


def _in_backward(simulator: Simulator, options: SearchOptions) -> list[BudgetPoint]:
    """The points at which steps run, in each window the one with the most bytes that no plan avoids."""
    first, last = _first_step(simulator), _last_step(simulator)
    model = simulator.lifetimes
    is_both = (simulator.saved_nbytes > 0) & model.always_stored & ~model.may_stay_inside & (first <= last)
    delta = np.zeros(simulator.num_steps + 1, dtype=np.int64)
    np.add.at(delta, first[is_both], simulator.saved_nbytes[is_both])
    np.add.at(delta, last[is_both] + 1, -simulator.saved_nbytes[is_both])
    always = _gradient_bytes(simulator) + np.cumsum(delta)[:-1]
    earliest = _earliest(simulator)
    points = []
    for window in np.array_split(
        np.arange(simulator.num_steps), min(options.bound_backward_points, simulator.num_steps)
    ):
        b = int(window[np.argmax(always[window])])
        ahead = last >= b
        held = ahead & ~(is_both & (first <= b))
        points.append(BudgetPoint(int(always[b]), held, _late_pairs(simulator, b, ahead, earliest)))
    return points


def _gradient_bytes(simulator: Simulator) -> Ints:
    """Bytes of outputs, gradients and temporaries while each step runs, [steps]."""
    m = simulator.num_steps
    delta = np.zeros(m + 2, dtype=np.int64)
    np.add.at(delta, simulator.step_item_of, simulator.lifetimes.step_bytes)
    ends = np.minimum(simulator.lifetimes.step_last + 1 - simulator.lifetimes.step_in_place, m + 1)
    np.add.at(delta, ends, -simulator.lifetimes.step_bytes)
    return np.asarray(np.cumsum(delta)[:m] + simulator.step_transient + simulator.output_bytes)


def _last_step(simulator: Simulator) -> Ints:
    """The last step that reads each value and does not write over it, [values]; -1 where there is none."""
    last = simulator.lifetimes.last_step.astype(np.int64)
    for b, sources in simulator.lifetimes.step_in_place_sources:
        last[[v for v in sources if simulator.lifetimes.last_step[v] == b]] = b - 1
    return last


def _first_step(simulator: Simulator) -> Ints:
    """The first step at or before which each value is read by a step: there it was computed, [values]."""
    return np.searchsorted(simulator.schedules.step_anchor, simulator.schedules.first_anchor)


def _earliest(simulator: Simulator) -> Ints:
    """The anchor before which no plan recomputes each value: the first of all that it can be computed for."""
    found = np.minimum(simulator.schedules.first_anchor, simulator.schedules.late_anchor).astype(np.int64)
    for v in range(simulator.num_values - 1, -1, -1):
        for w in simulator.readers[v]:
            found[v] = min(found[v], found[w])
    return np.asarray(found)


def _late_pairs(simulator: Simulator, b: int, known: Bools, earliest: Ints) -> tuple[tuple[int, int], ...]:
    """Values, not `known` to live at step b, with the readers that are recomputed after it if at all."""
    anchor = int(simulator.schedules.step_anchor[b])
    is_late = (earliest > anchor) & (earliest < NEVER)
    open_values = np.flatnonzero(~known & (simulator.saved_nbytes > 0)).tolist()
    return tuple((v, w) for v in open_values for w in simulator.readers[v] if is_late[w])
