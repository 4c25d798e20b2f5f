"""Parametric min-cut: the cheapest values to save if a saved byte costs `price` nanoseconds.

Each value has two binary variables: *available* in the backward, and *recomputed* there.  A value that is available and not
recomputed is saved, and costs its bytes; a recomputed value costs its time and makes its inputs available.  Every term is
submodular, so one s-t cut is exact (project selection): source -> available if the backward reads the value, available ->
recomputed with the cost of saving, recomputed -> sink with the time, recomputed -> available(input) without limit.  Sweeping the
price walks the lower convex hull of saved bytes against time.  Every cut is a proof: the cut's value minus `price` x budget is a
lower bound of the time of all plans that save no more than the budget (Lagrangian duality).

Max-flow is scipy's Dinic (int32 capacities, so capacities are scaled and rounded *down*: the bound stays a bound).  Of all
minimum cuts, the solver takes the one nearest to the source, which makes ties deterministic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy

from compile_remat.passes.problem.problem import SAVE, Problem
from compile_remat.passes.search.options import DEFAULT

INFINITE = 2**31 - 2
SCALE_TO = 2**29
"""The sum of the finite capacities after scaling: so far below INFINITE that no minimum cut contains an infinite edge."""


@dataclass(frozen=True)
class Cut:
    """One point of the hull.

    Attributes:
        price: Cost of a saved byte in this cut, ns.
        saved: Indices of the saved values.
        saved_bytes: Bytes of the saved values (outputs count 0).
        time_ns: Recomputed work plus the traffic of saving.
        value: Scaled-down value of the cut: at most ``time_ns + price * saved_bytes`` of any plan.
    """

    price: float
    saved: tuple[int, ...]
    saved_bytes: int
    time_ns: int
    value: float


class CutSolver:
    """Cuts of one problem at any price.

    Attributes:
        num_cuts: Number of cuts asked for.  A search asks for the bound at its budget many times, but each cut is solved once.
    """

    def __init__(self, problem: Problem) -> None:
        values = problem.values
        self.problem = problem
        n = len(values)
        self.nbytes = np.array([0 if v.is_output else v.nbytes for v in values], dtype=np.float64)
        self.time = np.array([v.time_ns for v in values], dtype=np.float64)
        self.save_time = np.array([v.save_time_ns for v in values], dtype=np.float64)
        self.finite = np.array([v.is_saveable for v in values], dtype=bool)
        pinned = np.array([v.pin == SAVE and v.is_saveable for v in values], dtype=bool)
        needed = sorted({v for s in problem.steps for v in s.reads})
        source, sink = 2 * n, 2 * n + 1
        own = np.arange(n)
        readers = np.repeat(own, [len(v.reads) for v in values])
        read = np.array([v for value in values for v in value.reads], dtype=np.int64)
        rows = np.concatenate([np.full(len(needed), source), own, n + own, n + readers])
        cols = np.concatenate([np.array(needed, dtype=np.int64), n + own, np.full(n, sink), read])
        self.rows, self.cols = rows.astype(np.int32), cols.astype(np.int32)
        self.capacity = np.full(len(rows), float(INFINITE))
        self._order = np.lexsort((self.cols, self.rows))  # by row, as a sparse matrix has them
        self._indices = self.cols[self._order]
        self._starts = np.searchsorted(self.rows[self._order], np.arange(2 * n + 3)).astype(np.int32)
        self.save_slots = slice(len(needed), len(needed) + n)
        self.work_slots = slice(len(needed) + n, len(needed) + 2 * n)
        self.pinned = pinned
        self.num_cuts = 0
        self._known: dict[float, Cut] = {}

    def cut(self, price: float) -> Cut:
        """The cheapest saved set when a byte costs `price` ns."""
        self.num_cuts += 1
        if price not in self._known:
            self._known[price] = self._solved(price)
        return self._known[price]

    @property
    def known(self) -> list[Cut]:
        """All cuts solved so far."""
        return list(self._known.values())

    def _solved(self, price: float) -> Cut:
        n = len(self.nbytes)
        save = np.where(self.finite, self.save_time + price * self.nbytes, np.inf)
        work = np.where(self.pinned, np.inf, self.time)
        total = float(save[np.isfinite(save)].sum() + work[np.isfinite(work)].sum())
        scale = SCALE_TO / max(total, 1.0)
        capacity = self.capacity.copy()
        capacity[self.save_slots] = np.where(np.isfinite(save), np.floor(save * scale), INFINITE)
        capacity[self.work_slots] = np.where(np.isfinite(work), np.floor(work * scale), INFINITE)
        size = 2 * n + 2
        data = capacity.astype(np.int32)[self._order]
        graph = scipy.sparse.csr_array((data, self._indices, self._starts), shape=(size, size))
        flow = scipy.sparse.csgraph.maximum_flow(graph, 2 * n, 2 * n + 1)
        residual = graph - flow.flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        reached = np.zeros(size, dtype=bool)
        reached[scipy.sparse.csgraph.breadth_first_order(residual, 2 * n, directed=True, return_predecessors=False)] = (
            True
        )
        saved = np.flatnonzero(reached[:n] & ~reached[n : 2 * n])
        recomputed = reached[n : 2 * n]
        time_ns = int(self.time[recomputed].sum() + self.save_time[saved].sum())
        return Cut(price, tuple(saved.tolist()), int(self.nbytes[saved].sum()), time_ns, flow.flow_value / scale)


def hull(solver: CutSolver, max_cuts: int = DEFAULT.hull_cuts) -> list[Cut]:
    """At most `max_cuts` points of the lower convex hull of saved bytes against time, the point of most bytes first."""
    rich, poor = solver.cut(0.0), solver.cut(_dear_price(solver))
    found = {poor.saved_bytes: poor, rich.saved_bytes: rich}  # if both are one point, price 0 proves more
    pending = [(rich, poor)]
    while pending and len(found) < max_cuts:
        pending.sort(key=lambda pair: _gap(*pair))
        left, right = pending.pop()
        if left.saved_bytes <= right.saved_bytes:
            continue
        price = (right.time_ns - left.time_ns) / (left.saved_bytes - right.saved_bytes)
        middle = solver.cut(price)
        if middle.saved_bytes in found or not right.saved_bytes < middle.saved_bytes < left.saved_bytes:
            continue
        found[middle.saved_bytes] = middle
        pending += [(left, middle), (middle, right)]
    return [found[b] for b in sorted(found, reverse=True)]


def lower_bound_ns(
    solver: CutSolver, cuts: list[Cut], saved_budget_bytes: int, max_cuts: int = DEFAULT.bound_cuts
) -> int | None:
    """Lower bound of the time of any plan that saves at most `saved_budget_bytes`; None if no plan saves so little.

    The bound is exact on the hull: further cuts between the two hull points around the budget find the best multiplier.
    """
    floor = min(c.saved_bytes for c in cuts)
    if saved_budget_bytes < floor:
        return None
    left = min((c for c in cuts if c.saved_bytes > saved_budget_bytes), key=lambda c: c.saved_bytes, default=None)
    right = max((c for c in cuts if c.saved_bytes <= saved_budget_bytes), key=lambda c: c.saved_bytes)
    best = max(_bound_ns(c, saved_budget_bytes) for c in cuts)
    while left is not None and left.saved_bytes > right.saved_bytes and max_cuts:
        max_cuts -= 1
        price = (right.time_ns - left.time_ns) / (left.saved_bytes - right.saved_bytes)
        middle = solver.cut(price)
        best = max(best, _bound_ns(middle, saved_budget_bytes))
        if middle.saved_bytes in (left.saved_bytes, right.saved_bytes):
            break
        if middle.saved_bytes > saved_budget_bytes:
            left = middle
        else:
            right = middle
    return max(0, best)


def _bound_ns(cut: Cut, saved_budget_bytes: int) -> int:
    """The bound that the cut proves, rounded up because times are whole; the slack covers the arithmetic of floats."""
    charge = cut.price * saved_budget_bytes
    slack = 1e-6 + 1e-12 * (cut.value + abs(charge))
    return math.ceil(cut.value - charge - slack)


def _dear_price(solver: CutSolver) -> float:
    smallest = solver.nbytes[solver.nbytes > 0].min(initial=1.0)
    return float((solver.time.sum() + solver.save_time.sum() + 1.0) / smallest)


def _gap(left: Cut, right: Cut) -> float:
    return (left.saved_bytes - right.saved_bytes) * max(0, right.time_ns - left.time_ns)


def pinned_indices(problem: Problem) -> tuple[int, ...]:
    """Indices of the values that every plan saves if the backward needs them."""
    return tuple(i for i, v in enumerate(problem.values) if v.pin == SAVE and v.is_saveable)
