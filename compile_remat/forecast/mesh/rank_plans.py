"""Plans of the graphs of one rank's step, under the budget that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compile_remat.forecast.target_step import Ready
from compile_remat.passes import Plan, PlanOption, plain_option, plan_options
from compile_remat.passes.search.plan_menu import option_of
from compile_remat.planning.budget_source import EffectiveBudget, bytes_of
from compile_remat.planning.deadline import noting_early_end, with_search_message
from compile_remat.planning.joint_allocation import RegionCall, allocate, step_peak_bytes
from compile_remat.planning.plan_policy import choose
from compile_remat.planning.settings import SHARES_BUDGET
from compile_remat.planning.shared_policy import excess_text
from compile_remat.report import joined


@dataclass(frozen=True)
class RankPlans:
    """A plan for each graph of a step.

    Attributes:
        plans: Plans in the order of the graphs.
        peak_bytes: Peak bytes of all graphs together.
        floor_bytes: The lowest reachable `peak_bytes`.
        budget_bytes: The requested bytes; None if only speed or only memory counts.
        plain_bytes: The step's peak under plain torch.compile; None unless the budget is a fraction.
        message: Difference between the plans and the request; empty if there is none.
    """

    plans: tuple[Plan, ...]
    peak_bytes: int
    floor_bytes: int
    budget_bytes: int | None
    plain_bytes: int | None = None
    message: str = ""


def plans_for(graphs: Sequence[Ready], calls: Sequence[RegionCall], effective: EffectiveBudget) -> RankPlans:
    """Choose a plan for each graph so that the step keeps the budget.

    Args:
        graphs: The graphs; torch's saved set is a candidate of their problems if the budget is `max` or a fraction.
        calls: The step.  The bytes beside a call count against the budget, and are in no peak that is returned.

    Raises:
        BudgetError: The budget was given, and no choice of plans keeps it.
    """
    plain_bytes = None
    if effective.budget.kind == "fraction":
        plain = [plain_option(graph.with_torch) for graph in graphs]
        plain_bytes = step_peak_bytes(calls, plain)
        effective = replace(effective, plain_bytes=plain_bytes)
    if len(calls) == 1:
        return replace(_alone(graphs[0], effective), plain_bytes=plain_bytes)
    is_max = effective.budget.kind == "max"
    found = _fastest(graphs, _alone_in_memory(calls), effective) if is_max else _together(graphs, calls, effective)
    kept = SHARES_BUDGET if any(graph.planner.link is not None for graph in graphs) and not is_max else ""
    return replace(found, plain_bytes=plain_bytes, message=joined(found.message, kept))


def _alone(graph: Ready, effective: EffectiveBudget) -> RankPlans:
    planner = graph.planner
    with noting_early_end(planner):
        choice = with_search_message(choose(planner, effective), planner)
    plan = replace(choice.plan, budget_bytes=bytes_of(effective))
    return RankPlans((plan,), plan.peak_bytes, planner.lowest().peak_bytes, plan.budget_bytes, message=choice.message)


def _fastest(graphs: Sequence[Ready], calls: Sequence[RegionCall], effective: EffectiveBudget) -> RankPlans:
    plans = tuple(choose(graph.planner, effective).plan for graph in graphs)
    options = [option_of(graph.planner, plan) for graph, plan in zip(graphs, plans, strict=True)]
    floor = allocate(calls, [plan_options(graph.planner) for graph in graphs], None)
    return RankPlans(plans, step_peak_bytes(calls, options), floor.peak_bytes, None)


def _alone_in_memory(calls: Sequence[RegionCall]) -> list[RegionCall]:
    return [replace(call, beside_bytes=0) for call in calls]


def _together(graphs: Sequence[Ready], calls: Sequence[RegionCall], effective: EffectiveBudget) -> RankPlans:
    menus = [plan_options(graph.planner) for graph in graphs]
    budget_bytes = bytes_of(effective)
    floor = allocate(calls, menus, None)
    found = floor if budget_bytes is None else allocate(calls, menus, budget_bytes)
    plans = tuple(_plan_of(graph, menus[k][found.chosen[k]]) for k, graph in enumerate(graphs))
    message = excess_text(
        found,
        budget_bytes,
        num_runs=len(calls),
        source=effective.source,
        budget=effective.budget,
        largest=max(plans, key=lambda plan: plan.peak_bytes).largest,
    )
    own = _alone_in_memory(calls)
    peak_bytes = step_peak_bytes(own, [menus[k][found.chosen[k]] for k in range(len(graphs))])
    return RankPlans(plans, peak_bytes, allocate(own, menus, None).peak_bytes, budget_bytes, message=message)


def _plan_of(graph: Ready, option: PlanOption) -> Plan:
    return graph.planner.plan_of(graph.planner.mask_of(option.saved), None)
