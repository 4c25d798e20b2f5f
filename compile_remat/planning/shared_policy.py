"""The plan option of a region that shares its budget with other calls in the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compile_remat._util.units import format_bytes
from compile_remat.errors import (
    SharedBudgetError,
    warn,
)
from compile_remat.passes import (
    Planner,
    PlanOption,
    plan_options,
)
from compile_remat.planning.budget_source import EffectiveBudget
from compile_remat.planning.joint_allocation import RegionCall, allocate, step_peak_bytes
from compile_remat.planning.plan_policy import keyed, lapsed_text, planners
from compile_remat.planning.request import ChosenPlan, SharedOption
from compile_remat.report import joined


def choose_shared(planner: Planner, request: SharedOption, effective: EffectiveBudget) -> ChosenPlan:
    """A plan option for a region that runs beside others, with the menu of all its options.

    Raises:
        SharedBudgetError: Nothing fits beside what the others hold.
    """
    calls = [RegionCall(0, request.gradient_bytes)] * max(1, request.calls)
    found: list[tuple[int, ChosenPlan]] = []
    for planned, lapsed in planners(planner):
        menu = plan_options(planned)
        limit_bytes = _limit_of(effective, menu, calls)
        left_bytes = None if limit_bytes is None else limit_bytes - request.others_bytes
        if request.calls:
            (best,) = allocate(calls, [menu], left_bytes).chosen
        else:
            fitting = [
                k for k, o in enumerate(menu) if left_bytes is None or o.peak_bytes + o.kept_output_bytes <= left_bytes
            ]
            best = min(
                fitting or range(len(menu)),
                key=lambda k: (menu[k].held_bytes * bool(fitting), menu[k].peak_bytes),
            )
        plan = keyed(planned.plan_of(planned.mask_of(menu[best].saved), None), planner)
        peak_bytes = request.others_bytes + step_peak_bytes(calls, [menu[best]])
        found.append((peak_bytes, ChosenPlan(plan, message=lapsed_text(lapsed), offers=menu)))
        if limit_bytes is None or peak_bytes <= limit_bytes:
            return found[-1][1]
    peak_bytes, choice = min(found, key=lambda f: f[0])
    assert limit_bytes is not None
    if not effective.source and not request.may_miss:
        largest = choice.plan.largest
        raise SharedBudgetError(limit_bytes, peak_bytes, largest, request.others_bytes, len(calls))
    text = (
        f"{effective.source or 'memory_budget'} allows {format_bytes(limit_bytes)}, and the graphs of this step need "
        f"{format_bytes(peak_bytes)}"
    )
    if request.may_miss:
        text += ", because the first ones were planned as if they were alone; from the next step on they are planned together"
    warn(text)
    return replace(choice, message=joined(choice.message, text))


def _limit_of(effective: EffectiveBudget, menu: Sequence[PlanOption], calls: Sequence[RegionCall]) -> int | None:
    """The budget of a step in bytes; a fraction of one is known only with the number of runs."""
    if effective.budget.kind == "fraction" and len(calls) > 1:
        return int(float(effective.budget.value or 0) * step_peak_bytes(calls, [min(menu, key=lambda o: o.time_ns)]))
    return int(effective.budget.value or 0) if effective.budget.kind == "bytes" else None
