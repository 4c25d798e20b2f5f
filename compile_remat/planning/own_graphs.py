"""A plan's peak in the very graphs that Inductor gets.

What Inductor writes to memory depends on what is saved: a step with 33 operations is written, and with a saved value among
what it reads it has 29 and is computed in its readers' kernels.  The search works on one problem for all plans, in which the
backward computes whatever it reads.  Here the problem is built for the plan that was found.  Where that plan misses its budget
there, the search goes on in that problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from compile_remat.errors import BudgetError
from compile_remat.passes import Plan, Planner, Problem, obeying, timeline
from compile_remat.planning.plan_policy import keyed
from compile_remat.planning.request import ChosenPlan

MOST_PROBLEMS = 3
"""Problems of plans that are built for one budget."""

Build = Callable[[frozenset[str]], Problem]
"""Builds the problem of the plan that saves these values."""

Choose = Callable[[Planner], ChosenPlan]
"""Searches for a plan."""


@dataclass(frozen=True)
class OwnGraphs:
    """A plan, and the problem of its own graphs, in which it has the peak that it says."""

    chosen: ChosenPlan
    problem: Problem


def in_own_graphs(
    chosen: ChosenPlan, planner: Planner, build: Build, search: Choose | None, limit_bytes: int | None
) -> OwnGraphs:
    """The plan with its peak in its own graphs, or a better one that the search in those found.

    Args:
        chosen: What the search on `planner`'s problem gave.
        search: Looks for another plan; None where this one stays.
        limit_bytes: What the plan has to keep; None where the lowest is asked for.
    """
    found = list(_rounds(chosen, planner, build, search, limit_bytes))
    kept = [own for own in found if limit_bytes is not None and own.chosen.plan.peak_bytes <= limit_bytes]
    if kept:
        return min(kept, key=lambda own: own.chosen.plan.extra_time_ns)
    return min(found, key=lambda own: own.chosen.plan.peak_bytes)


def _rounds(
    chosen: ChosenPlan, planner: Planner, build: Build, search: Choose | None, limit_bytes: int | None
) -> Iterator[OwnGraphs]:
    for left in reversed(range(MOST_PROBLEMS)):
        problem = build(frozenset(chosen.plan.saved))
        plan, expected_bytes = _with_peak_of(chosen.plan, problem), chosen.plan.peak_bytes
        peak_bytes = plan.peak_bytes
        floor_bytes = peak_bytes if chosen.floor_bytes == expected_bytes else chosen.floor_bytes
        yield OwnGraphs(replace(chosen, plan=plan, floor_bytes=floor_bytes), problem)
        is_met = peak_bytes <= expected_bytes if limit_bytes is None else peak_bytes <= limit_bytes
        if is_met or search is None or not left:
            return
        try:
            other = search(planner.on(problem))
        except BudgetError:
            return
        chosen = replace(other, plan=keyed(other.plan, planner))


def _with_peak_of(plan: Plan, problem: Problem) -> Plan:
    seen = timeline(obeying(problem, ()), plan)  # whatever tags the plan set aside
    return replace(
        plan,
        peak_bytes=seen.peak_bytes,
        forward_peak_bytes=seen.forward_peak_bytes,
        least_peak_bytes=min(plan.least_peak_bytes, seen.peak_bytes),
        largest=seen.largest,
    )
