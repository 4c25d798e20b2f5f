"""The plan of a forecast: for the whole graph if that plan keeps the budget, else with as many slices as needed (`slices`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compile_remat.errors import BudgetError
from compile_remat.forecast.fake_trace import Traced, rewritten_joint
from compile_remat.forecast.target_step import Target, ready, with_early_gradients
from compile_remat.passes import NotSliced, Planner, Problem, SlicedGraph, slice_largest, split_convolution_gradients
from compile_remat.planning.budget_source import EffectiveBudget, bytes_of
from compile_remat.planning.deadline import noting_early_end, with_search_message
from compile_remat.planning.plan_policy import choose
from compile_remat.planning.request import ChosenPlan
from compile_remat.planning.slices.choice import NUMBERS, Candidate, best_of, is_slower, reasons_of
from compile_remat.report import joined


@dataclass(frozen=True)
class FoundPlan:
    """A plan with the problem of its graph.

    Attributes:
        floor_bytes: The lowest peak of this graph.
    """

    choice: ChosenPlan
    problem: Problem
    floor_bytes: int


def found_within(chosen_on: Planner, planner: Planner, effective: EffectiveBudget) -> FoundPlan | BudgetError:
    """Returns the plan for a budget, or the error if none fits.

    Args:
        chosen_on: Planner that searches for the plan.
        planner: Planner that searches for the lowest peak.
    """
    try:
        with noting_early_end(chosen_on):
            choice = with_search_message(choose(chosen_on, effective), chosen_on)
    except BudgetError as error:
        return error
    return FoundPlan(choice, chosen_on.problem, planner.lowest().peak_bytes)


def with_slices(
    whole: FoundPlan | BudgetError, traced: Traced, target: Target, effective: EffectiveBudget
) -> FoundPlan:
    """Returns the plan of the whole graph, or a plan with rows in slices if `target.slices` asks for slices.

    Args:
        traced: The step; `Traced.whole` is needed unless `target.slices` is `off`.
        effective: The budget that a plan has to keep, the same as for the whole graph.

    Raises:
        BudgetError: No plan fits.
    """
    is_auto = target.slices == "auto"
    is_kept = effective.budget.kind == "max" or (is_auto and _candidate(whole, effective).is_met)
    if target.slices == "off" or is_kept:
        return _checked(whole)
    found = [whole] if is_auto else []
    left: tuple[NotSliced, ...] = ()
    for graph in _graphs(traced, target):
        left = graph.left
        if not graph.products:
            break
        found.append(_found_in(graph, traced, target, effective))
        if is_slower([_candidate(plan, effective) for plan in found]):
            break
    found = found or [whole]
    best = found[best_of([_candidate(plan, effective) for plan in found])]
    text = reasons_of(left, is_whole=all(plan is whole for plan in found))
    if isinstance(best, BudgetError):
        raise best.with_hint(text) if text else best
    return replace(best, choice=replace(best.choice, message=joined(best.choice.message, text)))


def _graphs(traced: Traced, target: Target) -> Iterator[SlicedGraph]:
    for number in NUMBERS if target.slices == "auto" else (int(target.slices),):
        module, keywords = traced.whole_on_cpu()
        shape = {name: keywords.get(name) for name in ("num_fwd_outputs", "static_lifetime_input_indices")}
        yield slice_largest(module, number, **shape)  # type: ignore[arg-type]


def _found_in(
    graph: SlicedGraph, traced: Traced, target: Target, effective: EffectiveBudget
) -> FoundPlan | BudgetError:
    assert traced.whole is not None
    joint = rewritten_joint((graph.module, traced.whole[1]), traced.joint.readable)
    assert joint is not None
    sliced = replace(traced, joint=joint).cut_off(target.inputs)
    sliced.place(target.figures())
    split_convolution_gradients(joint)
    if target.gradients == "early":
        sliced = with_early_gradients(sliced)
    planner = ready(sliced, target, {}, is_candidate=False).planner
    found = found_within(planner, planner, effective)
    if isinstance(found, BudgetError):
        return found
    return replace(found, choice=replace(found.choice, plan=replace(found.choice.plan, sliced=graph.products)))


def _candidate(found: FoundPlan | BudgetError, effective: EffectiveBudget) -> Candidate:
    if isinstance(found, BudgetError):
        return Candidate(found.floor_bytes, 0, False)
    plan, limit = found.choice.plan, bytes_of(effective)
    is_met = effective.budget.kind != "min" and limit is not None and plan.peak_bytes <= limit
    return Candidate(plan.peak_bytes, plan.step_time_ns + plan.extra_time_ns, is_met)


def _checked(found: FoundPlan | BudgetError) -> FoundPlan:
    if isinstance(found, BudgetError):
        raise found
    return found
