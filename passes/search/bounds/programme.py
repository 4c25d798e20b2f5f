"""A linear programme over the available and the recomputed values of the backward; only its multipliers are trusted.

Any multipliers prove a bound: the minimum of the Lagrangian over the box of the variables, which is computed here (Neumaier and
Shcherbina, Safe bounds in linear and mixed-integer linear programming, 2004).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from compile_remat.passes.memory.simulator import Floats, Simulator
from compile_remat.passes.problem.problem import SAVE

Entry = tuple[int, float]
"""Number of a variable, and its weight in a row."""


@dataclass(frozen=True)
class Away:
    """Bytes that may be absent from the device's memory at all points at once.

    Attributes:
        cost_ns: The least time that it takes if all of them are; a part of the bytes costs its part of the time.
    """

    nbytes: int
    cost_ns: int


@dataclass(frozen=True)
class Solution:
    """The solver's solution at one budget.

    Attributes:
        multipliers: Multipliers of the rules in ns, of the points in ns per byte, [rows]; zeros, which prove nothing, if unsolved.
        values: Values of the variables, [variables]; None if unsolved.
    """

    multipliers: Floats
    values: Floats | None


class Programme:
    """Rows `weights @ variables <= right` that every plan meets, and the cost of the variables, ns.

    Variables lie in [0, 1]: first, for each value, `available` in the backward, then `recomputed` there; their difference is 1 if
    the value is saved.  The method `variables` adds others.

    Args:
        away: Bytes that may be on the host, so that they do not count at a point; none of them by default.
    """

    def __init__(self, simulator: Simulator, away: Sequence[Away] = ()) -> None:
        values = simulator.problem.values
        self.num_values = n = len(values)
        self._lengths: list[int] = []
        self._columns: list[int] = []
        self._weights: list[float] = []
        self._right: list[float] = []
        self._is_point: list[bool] = []
        self._made: scipy.sparse.csr_array | None = None
        self._num_variables = 2 * n
        self._cost = np.concatenate([simulator.save_time_ns, simulator.time_ns - simulator.save_time_ns]).astype(float)
        self._box = np.zeros((2 * n, 2))
        self._box[:, 1] = 1.0
        self._box[sorted({v for s in simulator.problem.steps for v in s.reads}), 0] = 1.0
        self._box[[n + v for v in range(n) if values[v].pin == SAVE and values[v].is_saveable], 1] = 0.0
        first = self.variables(len(away))
        self._cost = np.append(self._cost, [each.cost_ns for each in away])
        self._away: list[Entry] = [(first + k, -each.nbytes) for k, each in enumerate(away)]
        for w in range(n):
            for v in values[w].reads:
                self.at_most([(n + w, 1), (v, -1)])
        for v in range(n):
            self.at_most([(n + v, 1), (v, -1)])
        for v in np.flatnonzero(self._box[:n, 0] == 0).tolist():  # available only if a reader is recomputed
            self.at_most([(v, 1), *((n + w, -1) for w in simulator.readers[v])])
        for v in range(n):
            if not values[v].is_saveable:  # available only by being recomputed
                self.at_most([(v, 1), (n + v, -1)])

    def variables(self, count: int = 1) -> int:
        """Adds `count` free variables; returns the number of the first."""
        first = self._num_variables
        self._num_variables += count
        return first

    @property
    def cost(self) -> Floats:
        """Cost of each variable, ns, [variables]."""
        return np.append(self._cost, np.zeros(self._num_variables - len(self._cost)))

    @property
    def box(self) -> Floats:
        """Lower and upper limit of each variable, [variables, 2]."""
        free = np.tile([0.0, 1.0], (self._num_variables - len(self._box), 1))
        return np.concatenate([self._box, free])

    def saved(self, v: int, weight: float = 1.0) -> list[Entry]:
        """Entries that sum to `weight` if value `v` is saved."""
        return [(v, weight), (self.num_values + v, -weight)]

    def at_most(self, entries: Sequence[Entry], right: float = 0.0) -> None:
        """Adds a rule: the entries sum to at most `right`."""
        self._add(entries, right, is_point=False)

    def point(self, entries: Sequence[Entry], fixed_bytes: int) -> None:
        """Adds a point of the step: the entries plus `fixed_bytes` stay within the budget."""
        self._add([*entries, *self._away], -float(fixed_bytes), is_point=True)

    def _add(self, entries: Sequence[Entry], right: float, *, is_point: bool) -> None:
        columns, weights = zip(*entries, strict=True) if entries else ((), ())
        self._columns += columns
        self._weights += weights
        self._lengths.append(len(columns))
        self._right.append(right)
        self._is_point.append(is_point)

    @property
    def num_entries(self) -> int:
        """Number of weights in all rows."""
        return len(self._weights)

    def solve(self, budget_bytes: int) -> Solution:
        """The fastest fractional plan within the budget."""
        cost = self.cost
        unit = max(1.0, float(cost.max(initial=0.0)))
        limits = self._limits(budget_bytes)
        scales = np.where(self._is_point, max(1.0, float(budget_bytes)), 1.0)
        matrix = scipy.sparse.diags_array(1.0 / scales) @ self._matrix()
        found = scipy.optimize.linprog(
            cost / unit, A_ub=matrix, b_ub=limits / scales, bounds=self.box, method="highs-ds"
        )
        if found.status != 0:  # below the lowest peak
            return Solution(np.zeros(len(limits)), None)
        return Solution(np.maximum(0.0, -found.ineqlin.marginals) * unit / scales, np.asarray(found.x))

    def branch(self, budget_bytes: int, most_nodes: int, most_seconds: float = math.inf) -> tuple[int, Floats | None]:
        """Branch and bound over integral answers: the least time of any plan within the budget, ns, and the best answer found.

        Args:
            most_nodes, most_seconds: The search ends after so many nodes or seconds, with the bound proven by then.

        The bound is as exact as the solver's arithmetic (HiGHS; a millionth of the largest cost is taken off), unlike `proven_ns`.
        The answer is None if the solver found none, or showed that none exists.
        """
        cost, limits = self.cost, self._limits(budget_bytes)
        unit = max(1.0, float(cost.max(initial=0.0)))
        scales = np.where(self._is_point, max(1.0, float(budget_bytes)), 1.0)
        is_whole = np.arange(self._num_variables) < 2 * self.num_values
        found = scipy.optimize.milp(
            cost / unit,
            integrality=is_whole.astype(int),
            bounds=scipy.optimize.Bounds(self.box[:, 0], self.box[:, 1]),
            constraints=scipy.optimize.LinearConstraint(
                scipy.sparse.diags_array(1.0 / scales) @ self._matrix(), ub=limits / scales
            ),
            options={"node_limit": most_nodes, "time_limit": most_seconds, "mip_rel_gap": 1e-5},
        )
        proven = found.mip_dual_bound
        least_ns = 0 if proven is None or not math.isfinite(proven) else math.ceil((proven - 1e-6) * unit)
        return least_ns, None if found.x is None else np.asarray(found.x)

    def proven_ns(self, multipliers: Floats, budget_bytes: int) -> int:
        """The bound that the multipliers prove, rounded up because times are whole; the slack covers floats' arithmetic."""
        matrix, limits, cost, box = self._matrix(), self._limits(budget_bytes), self.cost, self.box
        reduced = cost + matrix.T @ multipliers
        terms = np.where(reduced > 0, reduced * box[:, 0], reduced * box[:, 1])
        charges = multipliers * limits
        size = np.abs(terms).sum() + np.abs(charges).sum() + np.abs(cost).sum()
        size += (abs(matrix).T @ multipliers).sum()
        return math.ceil(float(terms.sum() - charges.sum()) - 1e-6 - 1e-11 * float(size))

    def _limits(self, budget_bytes: int) -> Floats:
        return np.array(self._right) + np.where(self._is_point, float(budget_bytes), 0.0)

    def _matrix(self) -> scipy.sparse.csr_array:
        shape = len(self._right), self._num_variables
        if self._made is not None and self._made.shape == shape:
            return self._made
        rows = np.repeat(np.arange(len(self._lengths)), self._lengths)
        self._made = scipy.sparse.csr_array((self._weights, (rows, self._columns)), shape=shape, dtype=np.float64)
        return self._made
