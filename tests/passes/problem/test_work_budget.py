"""Work is counted the same whatever was worked out before, and a search that runs out of it returns what it has."""

from __future__ import annotations

import numpy as np
import pytest

from compile_remat.passes import Plan, Planner, Problem
from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.work_budget import (
    CLOCK,
    LEAST_SECONDS,
    UNITS_PER_SECOND,
    WORK,
    WorkBudget,
    limit_seconds,
    units_of,
)
from tests.oracles.random_problems import Shape, chain, seeded_problem

LARGE = Shape(max_values=30, max_late=3, max_steps=25)
LIMITS = (1e-9, 0.0005, 0.002, 0.01, 0.05)


def test_what_is_shared_is_charged_to_every_search_once() -> None:
    work, built = WorkBudget(10), []

    def build() -> int:
        built.append(True)
        work.charge(4)
        return 7

    for _ in range(2):
        with work.search():
            assert not work.is_spent
            assert (work.shared("a", build), work.spent_units) == (7, 4)
            assert (work.shared("a", build), work.spent_units) == (7, 4)
            work.charge(6)
            assert work.is_spent
    assert (len(built), work.spent_units) == (1, 0)


def test_a_search_inside_another_has_a_count_of_its_own() -> None:
    work = WorkBudget(10)
    with work.search():
        work.charge(9)
        with pytest.raises(ValueError), work.search():
            work.charge(9)
            raise ValueError
        assert work.spent_units == 9


def test_without_a_limit_there_is_always_work_left() -> None:
    work = WorkBudget()
    work.charge(10**15)
    assert not work.is_spent


def test_limits() -> None:
    assert limit_seconds(0, None) == LEAST_SECONDS
    assert limit_seconds(40_000, None) == LEAST_SECONDS + 2
    assert limit_seconds(40_000, 0.5) == 0.5
    assert units_of(0.5) == UNITS_PER_SECOND // 2
    assert units_of(0.0) == 1


def test_plans_are_counted_by_their_size_and_kept_ones_too() -> None:
    problem = chain(10)
    simulator = Simulator(problem)
    cells = len(problem.values) + len(problem.steps)
    mask = np.zeros(10, dtype=bool)
    simulator.run(np.zeros((10, 3), dtype=bool))
    assert simulator.work.spent_units == 3 * cells
    simulator.one(mask)
    simulator.one(mask)
    assert simulator.work.spent_units == 5 * cells


def plans_of(problem: Problem, work_seconds: float | None, shares: tuple[float, ...]) -> list[Plan]:
    """Plans of one planner, at these parts of the fastest plan's peak; the lowest plan last."""
    planner = Planner(problem, work_seconds)
    top = planner.fastest().peak_bytes
    return [*(planner.within(int(share * top)) for share in shares), planner.lowest()]


@pytest.mark.parametrize("seed", range(0, 40, 10))
@pytest.mark.parametrize("work_seconds", LIMITS)
def test_a_plan_does_not_depend_on_what_was_asked_before(seed: int, work_seconds: float) -> None:
    problem = seeded_problem(seed, LARGE)
    one_planner = plans_of(problem, work_seconds, (0.9, 0.6, 0.3))[:3]
    fresh = [plans_of(problem, work_seconds, (share,))[0] for share in (0.9, 0.6, 0.3)]
    assert [p.saved for p in one_planner] == [p.saved for p in fresh]


def test_more_work_finds_better_plans() -> None:
    """Summed over problems: extra time where there is a plan within the budget, and the lowest peak."""
    found = {}
    for work_seconds in (1e-9, 0.02, None):
        planners = [Planner(seeded_problem(seed, LARGE), work_seconds) for seed in range(0, 60, 12)]
        found[work_seconds] = sum(planner.lowest().peak_bytes for planner in planners)
    assert found[1e-9] > found[0.02] >= found[None]


# -- what ended a search ------------------------------------------------------------------------------------------------


class After:
    """Answers the first `questions` questions with no, and all later ones with yes."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_limit_of_work_is_on_record_when_the_search_has_ended() -> None:
    work = WorkBudget(10)
    with work.search():
        work.charge(9)
    assert work.ends == set()
    with work.search():
        work.charge(10)
        assert work.is_spent and work.ends == set()
    assert work.ends == {WORK} and not work.is_spent


def test_who_said_once_that_it_is_over_is_not_asked_again() -> None:
    work, answers = WorkBudget(10, lambda: answers.pop(0)), [False, True]
    with work.search():
        assert not work.is_spent
        assert work.is_spent and work.is_spent
    with work.search():
        assert work.is_spent
    assert work.ends == {CLOCK}


def test_nobody_is_asked_where_the_work_is_done_anyway() -> None:
    work = WorkBudget(1, After(0))
    with work.search():
        work.charge(1)
        assert work.is_spent
    assert work.ends == {WORK}


@pytest.mark.parametrize("seed", range(0, 40, 8))
@pytest.mark.parametrize(
    ("work_seconds", "questions"), [*((s, None) for s in LIMITS), *((None, q) for q in (0, 1, 3, 10, 30))]
)
def test_the_best_plan_so_far_is_a_plan(seed: int, work_seconds: float | None, questions: int | None) -> None:
    """However little work is allowed, and whenever the search is stopped."""
    problem = seeded_problem(seed, LARGE)
    for share in (0.9, 0.6, 0.1):
        planner = Planner(problem, work_seconds, None if questions is None else After(questions))
        plan = planner.within(int(share * planner.fastest().peak_bytes))
        assert plan.budget_bytes and plan.is_feasible == (plan.peak_bytes <= plan.budget_bytes)
        assert plan.least_peak_bytes <= plan.peak_bytes and plan.bound_time_ns >= 0
        assert not plan.is_feasible or plan.extra_time_ns >= plan.bound_time_ns
        assert questions != 0 or planner.ends == {CLOCK}
        again = planner.plan_of(planner.mask_of(plan.saved), plan.budget_bytes, plan.again)
        assert (again.peak_bytes, again.extra_time_ns) == (plan.peak_bytes, plan.extra_time_ns)


def test_being_stopped_costs_quality() -> None:
    """Summed over problems: the lowest peak."""
    lowest = {
        q: [Planner(seeded_problem(s, LARGE), None, After(q)).lowest() for s in range(0, 60, 3)] for q in (0, 10**9)
    }
    assert sum(plan.peak_bytes for plan in lowest[0]) > sum(plan.peak_bytes for plan in lowest[10**9])


def test_a_planner_of_another_problem_has_the_same_limits_and_the_same_record() -> None:
    problem, other = seeded_problem(4, LARGE), seeded_problem(8, LARGE)
    planner = Planner(problem, 0.001)
    assert planner.on(problem) is planner
    made = planner.on(other)
    assert made.problem is other and made.work.limit_units == planner.work.limit_units
    made.lowest()
    assert planner.ends == {WORK}
    stopped = Planner(problem, None, After(0))
    stopped.on(other).lowest()
    assert CLOCK in stopped.ends
    assert Planner(problem).on(other).work.limit_units == Planner(other).work.limit_units


def test_searches_that_come_to_their_end_leave_no_record() -> None:
    planner = Planner(seeded_problem(4, LARGE), None, After(10**9))
    planner.within(int(0.6 * planner.fastest().peak_bytes))
    planner.lowest()
    assert planner.ends == set()
