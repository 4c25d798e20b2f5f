"""Chooses a plan for each of several graphs under one budget.

A step runs graphs forward in some order, some of them several times, and backward in the reverse order.  While one graph
runs, the saved tensors of earlier graphs are live too; in its backward also the parameter gradients of later graphs and the
incoming gradient.  The choice of one plan for each graph that takes the least time and exceeds the budget at no place of the
step is a small integer programme (solved by HiGHS).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from compile_remat.passes import PlanOption

MOST_PLACES = 256
"""Constraints of the integer programme, at most: a longer step is sampled at this many evenly spread calls, first and last
included."""


ROUNDINGS = 3
"""Solves with a lowered limit, at most, until the exact peak meets the budget."""


@dataclass(frozen=True)
class RegionCall:
    """One run of a graph in a step.

    Attributes:
        graph: Index of the graph.
        gradient_bytes: Bytes of the parameter gradients that its backward allocates first (no later graph has allocated them).
        beside_bytes: Bytes that others hold while it runs, forward or backward, and that count towards the budget.
    """

    graph: int
    gradient_bytes: int
    beside_bytes: int = 0


@dataclass(frozen=True)
class Allocation:
    """A plan for each graph, as an index into its menu, with the peak and the time of a step under these plans."""

    chosen: tuple[int, ...]
    peak_bytes: int
    time_ns: int


def step_peak_bytes(calls: Sequence[RegionCall], plans: Sequence[PlanOption]) -> int:
    """Returns the peak of a step in which graph g runs under ``plans[g]``."""
    held, later = 0, sum(call.gradient_bytes for call in calls)
    peak = 0
    for k, call in enumerate(calls):
        plan = plans[call.graph]
        later -= call.gradient_bytes
        kept_bytes = plan.kept_output_bytes * (k < len(calls) - 1)
        peak = max(peak, held + plan.peak_bytes + later + kept_bytes + call.beside_bytes)
        held += plan.held_bytes
    return peak


def allocate(
    calls: Sequence[RegionCall], menus: Sequence[Sequence[PlanOption]], budget_bytes: int | None
) -> Allocation:
    """Returns the fastest choice whose step stays within the budget; the one of lowest peak if none does, or without a budget.

    Args:
        calls: The calls of the step, in the order of the forwards.
        menus: The plan options of each graph.

    Raises:
        RuntimeError: HiGHS finds no choice even without a budget.
    """
    lowest = _solve(calls, menus, None)
    if lowest is None:
        raise RuntimeError("HiGHS found no choice of plans without a budget")
    limit_bytes = lowest.peak_bytes if budget_bytes is None else max(budget_bytes, lowest.peak_bytes)
    aim_bytes = limit_bytes
    for _ in range(ROUNDINGS):
        found = _solve(calls, menus, aim_bytes)
        if found is None:
            break  # only the lowest choice may fit, exactly at the limit; rounding can hide that from HiGHS
        if found.peak_bytes <= limit_bytes:
            return found
        aim_bytes -= found.peak_bytes - limit_bytes  # HiGHS meets its limits up to a tolerance
    return lowest


def _solve(
    calls: Sequence[RegionCall], menus: Sequence[Sequence[PlanOption]], budget_bytes: int | None
) -> Allocation | None:
    """Minimises the time within a budget, or the peak if the budget is None; returns None if HiGHS finds nothing."""
    first = np.concatenate([[0], np.cumsum([len(o) for o in menus])])
    num_choices = int(first[-1])
    flat = [option for graph in menus for option in graph]
    unit = max(1, max(o.peak_bytes for o in flat))  # bytes are scaled so that HiGHS sees figures near 1
    counts = np.bincount([call.graph for call in calls], minlength=len(menus))
    rows = _rows(calls, menus, first)
    live = np.array([row for row, _ in rows]) / unit
    beside = np.array([later for _, later in rows]) / unit
    one_each = np.zeros((len(menus), num_choices + 1))
    for g in range(len(menus)):
        one_each[g, first[g] : first[g + 1]] = 1
    peak_column = -np.ones((len(rows), 1)) if budget_bytes is None else np.zeros((len(rows), 1))
    limit = (0 if budget_bytes is None else budget_bytes / unit) - beside
    times = np.array([o.time_ns * int(counts[g]) for g, graph in enumerate(menus) for o in graph], dtype=float)
    scale = max(1.0, times.max(initial=0.0))
    objective = np.append(times / scale if budget_bytes is not None else np.zeros(num_choices), budget_bytes is None)
    result = scipy.optimize.milp(
        objective,
        integrality=np.append(np.ones(num_choices), 0),
        bounds=scipy.optimize.Bounds(0, np.append(np.ones(num_choices), np.inf)),
        constraints=[
            scipy.optimize.LinearConstraint(
                scipy.sparse.csr_array(np.hstack([live, peak_column])), -np.inf, limit + 1e-9
            ),
            scipy.optimize.LinearConstraint(scipy.sparse.csr_array(one_each), 1, 1),
        ],
    )
    if result.x is None:
        return None
    chosen = tuple(int(np.argmax(result.x[first[g] : first[g + 1]])) for g in range(len(menus)))
    plans = [menus[g][k] for g, k in enumerate(chosen)]
    time_ns = sum(plans[call.graph].time_ns for call in calls)
    return Allocation(chosen, step_peak_bytes(calls, plans), time_ns)


def _rows(
    calls: Sequence[RegionCall], menus: Sequence[Sequence[PlanOption]], first: np.ndarray
) -> list[tuple[np.ndarray, int]]:
    """Returns for each call of the step the live bytes of each choice, shape [choices], and the bytes that no choice changes."""
    held = np.zeros(int(first[-1]))
    later = sum(call.gradient_bytes for call in calls)
    rows = []
    for k, call in enumerate(calls):
        own = slice(int(first[call.graph]), int(first[call.graph + 1]))
        later -= call.gradient_bytes
        row = held.copy()
        row[own] += [o.peak_bytes + o.kept_output_bytes * (k < len(calls) - 1) for o in menus[call.graph]]
        rows.append((row, later + call.beside_bytes))
        held[own] += [o.held_bytes for o in menus[call.graph]]
    if len(rows) > MOST_PLACES:
        rows = [rows[k] for k in np.unique(np.linspace(0, len(rows) - 1, MOST_PLACES).astype(int))]
    return rows
