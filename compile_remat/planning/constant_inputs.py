"""How much lower or faster a plan is where nothing that the graph reads changes before the backward (`inputs="constant"`)."""

from __future__ import annotations

from compile_remat._util.units import format_bytes, format_time
from compile_remat.errors import BudgetError
from compile_remat.passes import Plan, Planner, Problem, has_snapshots, without_snapshots
from compile_remat.planning.budget_source import EffectiveBudget
from compile_remat.planning.plan_policy import choose, planners

LOWER, FASTER = 0.99, 0.005
"""Worth saying: less than this part of the peak, or so much of the step less."""


def snapshots_of(problem: Problem, plan: Plan) -> dict[str, int]:
    """Fields of a `Report`: how many snapshots of inputs a plan saves, with their bytes and the time of making them."""
    saved = frozenset(plan.saved)
    found = [value for value in problem.values if value.is_snapshot and value.name in saved]
    return {
        "num_snapshots": len(found),
        "snapshot_bytes": sum(value.nbytes for value in found),
        "snapshot_time_ns": sum(value.save_time_ns for value in found),
    }


def constant_floor_bytes(planner: Planner) -> int | None:
    """The lowest reachable peak where the backward may read every input; None where it may do so already."""
    if not has_snapshots(planner.problem):
        return None
    lenient = planner.on(without_snapshots(planner.problem))
    return min(planned.lowest().peak_bytes for planned, _ in planners(lenient))


def gain_of_constant(planner: Planner, plan: Plan, effective: EffectiveBudget, *, is_asked: bool) -> str:
    """The sentence for `explain` where a plan would be lower or faster; empty where it would not, or saves no snapshot."""
    is_asked = is_asked and effective.budget.kind != "max"
    if not is_asked or not snapshots_of(planner.problem, plan)["num_snapshots"]:
        return ""
    try:
        other = choose(planner.on(without_snapshots(planner.problem)), effective).plan
    except BudgetError:
        return ""
    spared_ns = plan.extra_time_ns - other.extra_time_ns
    if other.peak_bytes >= LOWER * plan.peak_bytes and spared_ns < FASTER * plan.step_time_ns:
        return ""
    return (
        f'with inputs="constant" the peak would be {format_bytes(other.peak_bytes)} and the extra time '
        f"{format_time(other.extra_time_ns)}, as the backward might read every input"
    )
