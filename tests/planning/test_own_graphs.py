"""What a plan takes in its own graphs, and which plan is kept."""

from __future__ import annotations

from dataclasses import replace

from compile_remat.errors import BudgetError
from compile_remat.passes import Planner, Problem, peak_bytes_of
from compile_remat.planning.own_graphs import MOST_PROBLEMS, in_own_graphs
from compile_remat.planning.request import ChosenPlan
from tests.oracles.random_problems import chain

PLANNER = Planner(chain(12))


def enlarged(factor: int) -> Problem:
    """The chain with larger values."""
    problem = PLANNER.problem
    return replace(problem, values=tuple(replace(v, nbytes=v.nbytes * factor) for v in problem.values))


def test_a_plan_that_keeps_its_budget_stays() -> None:
    plan, built = PLANNER.within(9), list[frozenset[str]]()

    def build(saved: frozenset[str]) -> Problem:
        built.append(saved)
        return PLANNER.problem

    own = in_own_graphs(ChosenPlan(plan), PLANNER, build, _none, 9)
    assert own.chosen.plan == plan and own.problem is PLANNER.problem and built == [frozenset(plan.saved)]


def _none(planner: Planner) -> ChosenPlan:
    raise AssertionError("nothing else is looked for")


def test_the_peak_is_that_of_the_plans_own_problem() -> None:
    """Also where no other plan is looked for; the lowest reachable peak is then that of the plan."""
    plan, larger = PLANNER.lowest(), enlarged(2)
    own = in_own_graphs(ChosenPlan(plan, plan.peak_bytes), PLANNER, lambda saved: larger, None, None)
    assert own.chosen.plan.peak_bytes == own.chosen.floor_bytes == peak_bytes_of(larger, plan.saved, plan.again)
    assert own.chosen.plan.saved == plan.saved and own.chosen.plan.peak_bytes > plan.peak_bytes


def test_where_the_budget_is_missed_the_search_goes_on_in_that_problem() -> None:
    larger, plan = enlarged(2), PLANNER.within(12)
    asked = []

    def search(planner: Planner) -> ChosenPlan:
        asked.append(planner.problem)
        return ChosenPlan(planner.within(16))

    own = in_own_graphs(ChosenPlan(plan), PLANNER, lambda saved: larger, search, 16)
    assert asked == [larger] and own.chosen.plan.peak_bytes <= 16 < peak_bytes_of(larger, plan.saved, plan.again)
    assert own.chosen.plan.problem_key == PLANNER.problem.key()


def test_what_no_plan_keeps_ends_with_the_lowest_peak() -> None:
    """Each round finds a plan that needs more in its own problem; the last one finds none."""
    plan, searched = PLANNER.lowest(), []

    def search(planner: Planner) -> ChosenPlan:
        searched.append(planner)
        return ChosenPlan(PLANNER.within(10 + len(searched)))

    own = in_own_graphs(ChosenPlan(plan), PLANNER, lambda saved: enlarged(3), search, 1)
    assert len(searched) == MOST_PROBLEMS - 1 and own.chosen.plan.saved == plan.saved

    def refused(planner: Planner) -> ChosenPlan:
        raise BudgetError(1, 2, ())

    assert (
        in_own_graphs(ChosenPlan(plan), PLANNER, lambda saved: enlarged(3), refused, 1).chosen.plan.saved == plan.saved
    )
