"""The best plan of a small problem: by trying all of them, or by HiGHS; and the cut, by networkx."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import (
    EXTERN,
    FREE,
    SAVE,
    Problem,
)

# -- all plans --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllPlans:
    """Peak, saved bytes and time of every plan of a small problem."""

    masks: NDArray[np.bool_]
    peaks: NDArray[np.int64]
    times: NDArray[np.int64]
    saved_bytes: NDArray[np.int64]

    @property
    def lowest_peak(self) -> int:
        """The least peak of any plan."""
        return int(self.peaks.min())

    def fastest_within(self, budget_bytes: int) -> int | None:
        """Time of the fastest plan whose peak fits; None where none does."""
        fits = self.peaks <= budget_bytes
        return int(self.times[fits].min()) if fits.any() else None


def free_choices(problem: Problem) -> list[int]:
    """Values that a plan may save or not."""
    return [v for v, value in enumerate(problem.values) if value.is_saveable and value.pin == FREE]


def all_plans(problem: Problem) -> AllPlans:
    """Simulate every saved set (pinned values included in each)."""
    free = free_choices(problem)
    n, count = len(problem.values), 1 << len(free)
    masks = np.zeros((n, count), dtype=bool)
    for k, v in enumerate(free):
        masks[v] = (np.arange(count) >> k) & 1
    for v, value in enumerate(problem.values):
        masks[v] |= value.pin == SAVE and value.is_saveable
    batch = Simulator(problem).run(masks)
    return AllPlans(masks, batch.peak, batch.time_ns, batch.saved_bytes)


# -- the cut ----------------------------------------------------------------------------------------------------------


def networkx_cut_value(problem: Problem, price: int) -> int:
    """Least `price` x saved bytes + time over all plans, by networkx; -1 where nothing is to be computed."""
    graph = nx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for v, value in enumerate(problem.values):
        nbytes = 0 if value.is_output else value.nbytes
        _edge(graph, ("A", v), ("R", v), value.save_time_ns + price * nbytes if value.is_saveable else None)
        _edge(graph, ("R", v), "sink", None if value.pin == SAVE and value.is_saveable else value.time_ns)
        for u in value.reads:
            _edge(graph, ("R", v), ("A", u), None)
    for step in problem.steps:
        for v in step.reads:
            _edge(graph, "source", ("A", v), None)
    return int(nx.maximum_flow_value(graph, "source", "sink"))


def _edge(graph: nx.DiGraph, tail: object, head: object, capacity: int | None) -> None:
    graph.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))


# -- the whole plan, exactly ------------------------------------------------------------------------------------------


def highs_fastest(problem: Problem, budget_bytes: int) -> int | None:
    """Least time of a plan whose peak fits, by HiGHS; None where there is none.

    Restriction: all values and steps are EXTERN, none is late, an output or transient, so that every node has a buffer
    from where it runs to its last reader and nothing is written over.

    Binaries: `s[v]` saved; `x[v, b]` computed once more in the burst before step b.  A value starts in a burst just if
    something in that burst reads it, and whatever reads it there or earlier finds it.  Moments are (b, k): value k of
    the burst before step b, and k = n is the step itself.  `a[v, moment]` is 1 while v is available and still to be
    read.
    """
    model = _Milp(problem)
    n, m = model.n, model.m
    for v in range(n):
        model.add({model.s(v): 1, **{model.x(v, b): 1 for b in range(m)}}, high=1)
        for b in range(m):
            model.add_start(v, b)
    for b in range(m):
        for k in range(n + 1):
            model.add_moment(b, k, budget_bytes)
    for place in range(n + 1):
        model.add_forward_place(place, budget_bytes)
    return model.solve()


class _Milp:
    def __init__(self, problem: Problem) -> None:
        self.values, self.steps = problem.values, problem.steps
        assert all(v.kernel == EXTERN and v.nbytes and not v.is_output and v.late_step < 0 for v in self.values)
        assert all(s.kernel == EXTERN for s in self.steps[:-1])
        self.n, self.m = len(self.values), len(self.steps)
        self.readers = [[w for w, x in enumerate(self.values) if v in x.reads] for v in range(self.n)]
        self.size = self.n + self.n * self.m + self.n * self.m * (self.n + 1)
        self.constraints: list[tuple[dict[int, float], float, float]] = []

    def s(self, v: int) -> int:
        return v

    def x(self, v: int, b: int) -> int:
        return self.n + v * self.m + b

    def a(self, v: int, b: int, k: int) -> int:
        return self.n + self.n * self.m + (v * self.m + b) * (self.n + 1) + k

    def add(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.constraints.append((terms, low, high))

    def add_start(self, v: int, b: int) -> None:
        """v starts before step b only for a reader there, and is there for every reader there."""
        is_read = v in self.steps[b].reads
        self.add({self.x(v, b): 1, **{self.x(w, b): -1.0 for w in self.readers[v]}}, high=float(is_read))
        here = {self.s(v): 1.0, **{self.x(v, c): 1.0 for c in range(b + 1)}}
        if is_read:
            self.add(here, low=1)
        for w in self.readers[v]:
            self.add({**here, self.x(w, b): -1.0}, low=0)

    def add_moment(self, b: int, k: int, budget_bytes: int) -> None:
        """Adds the constraints of one moment: a value that is available and still to be read is alive; live values fit."""
        live: dict[int, float] = {}
        for v in range(self.n):
            made = [c for c in range(self.m) if (c, v) <= (b, k)]
            available = {self.s(v): 1.0, **{self.x(v, c): 1.0 for c in made}}
            alive = self.a(v, b, k)
            if any(v in self.steps[c].reads for c in range(b, self.m)):
                self.add({alive: 1.0, **{i: -c for i, c in available.items()}}, low=0)
            for w in self.readers[v]:
                ahead = {self.x(w, c): -1.0 for c in range(self.m) if (c, w) >= (b, k)}
                self.add({alive: 1.0, **{i: -c for i, c in available.items()}, **ahead}, low=-1)
            live[alive] = float(self.values[v].nbytes)
        self.add(live, high=budget_bytes - self._step_bytes(b, k))

    def _step_bytes(self, b: int, k: int) -> int:
        """Bytes of the gradients that live at a moment."""
        total = 0
        for g, step in enumerate(self.steps):
            last = max([g, *(c for c, s in enumerate(self.steps) if g in s.gradients)])
            last = self.m if step.is_output else last
            is_made = g < b or (g == b and k == self.n)
            total += step.nbytes if is_made and last >= b else 0
        return total

    def add_forward_place(self, place: int, budget_bytes: int) -> None:
        """The forward: a value lives to its last reader, or to the end if it is saved."""
        base, saved = 0, {}
        for v, value in enumerate(self.values):
            if v <= place <= max([v, *self.readers[v]]):
                base += value.nbytes
            elif v <= place:
                saved[self.s(v)] = float(value.nbytes)
        self.add(saved or {0: 0.0}, high=budget_bytes - base)

    def solve(self) -> int | None:
        cost = np.zeros(self.size)
        lower, upper = np.zeros(self.size), np.ones(self.size)
        for v, value in enumerate(self.values):
            cost[self.s(v)] = value.save_time_ns
            for b in range(self.m):
                cost[self.x(v, b)] = value.time_ns
                upper[self.x(v, b)] = value.pin != SAVE
            upper[self.s(v)] = value.is_saveable
        matrix = np.zeros((len(self.constraints), self.size))
        for row, (terms, _, _) in enumerate(self.constraints):
            for column, factor in terms.items():
                matrix[row, column] = factor
        limits = LinearConstraint(matrix, [c[1] for c in self.constraints], [c[2] for c in self.constraints])
        integer = np.arange(self.size) < self.n + self.n * self.m
        found = milp(cost, constraints=limits, bounds=Bounds(lower, upper), integrality=integer.astype(int))
        assert found.status in (0, 2), found.message
        return None if found.status == 2 else round(found.fun)
