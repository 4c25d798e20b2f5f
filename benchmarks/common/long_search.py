"""A search with many times the work of the planner's own: how much of a gap is the plan's, and how much is the bound's."""

from dataclasses import replace

from compile_remat.passes import Plan, Planner, Problem, SearchOptions
from compile_remat.passes.memory.candidate_plan import Candidate, candidate
from compile_remat.passes.problem.work_budget import WorkBudget
from compile_remat.passes.search.moves import perturbation
from compile_remat.passes.search.recursive import search_on

MANY = 1 << 40

PATIENT = SearchOptions(
    close_gap=0.0,
    wide_gap=0.0,
    rounds=8,
    rounding_starts=12,
    window_rounds=12,
    operand_rounds=10,
    operand_share=0.2,
    operand_cells=1 << 23,
    min_peak_rounds=12,
    max_perturbations=MANY,
    faster_work=MANY,
    max_floor_perturbations=MANY,
    perturbation_work=MANY,
    perturbation_patience=MANY,
)
"""The normal search with more rounds of everything, no gap that is good enough, and perturbations until its work is done."""

NEAR = replace(PATIENT, swap_distance=8, max_moves=1200, pool_share=4096)
"""Perturbations around a plan: swaps with values further away, and small values too."""


def long_search(problem: Problem, plan: Plan, times: int = 20) -> Candidate:
    """The best plan of a search that simulates `times` as many plans as the search for `plan` did; no worse than `plan`.

    Half of them belong to a search that starts like the normal one, half to perturbations of `plan` itself, which keep the
    values that it computes twice.

    Args:
        plan: A plan for a budget that it keeps, or the lowest plan: then the long search is for the lowest peak, too.
    """
    most, budget_bytes = times * max(1, plan.simulations) // 2, plan.budget_bytes
    work = WorkBudget(is_over=lambda: near.simulations >= most)
    search = Planner(problem).search
    own = candidate(problem, Planner(problem).mask_of(plan.saved), plan.again, work)
    near = search_on(own, problem, search.pinned, search.searcher.weight, NEAR)
    if budget_bytes is None:
        mask = perturbation.lower(near, own.saved, NEAR.rounds, NEAR.strict_factor)
    else:
        mask = perturbation.faster(near, own.saved, budget_bytes)
    perturbed = replace(own, saved=mask, batch=own.simulator.one(mask))
    found = [own, perturbed, _from_start(problem, budget_bytes, most)]
    if budget_bytes is None:
        return min(found, key=lambda each: (each.peak_bytes, each.time_ns))
    return min((each for each in found if each.peak_bytes <= budget_bytes), key=lambda each: each.time_ns)


def _from_start(problem: Problem, budget_bytes: int | None, most: int) -> Candidate:
    planner = Planner(problem, MANY, is_over=lambda: planner.simulations >= most, options=PATIENT)
    plan = planner.lowest() if budget_bytes is None else planner.within(budget_bytes)
    return candidate(problem, planner.mask_of(plan.saved), plan.again)
