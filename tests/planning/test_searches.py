"""Planners of earlier rounds."""

from __future__ import annotations

import copy
import pickle

import pytest

from compile_remat.passes import Assumptions, Planner, Problem
from compile_remat.planning.searches import KEPT, Searches
from tests.oracles.random_problems import Shape, seeded_problem


def test_an_equal_problem_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches, problem = Searches(), seeded_problem(3, Shape(max_values=12))
    first = searches.planner(problem, None)
    lowest = first.lowest()
    equal = Problem(problem.values, problem.steps, problem.step_time_ns, problem.reference)
    assert searches.planner(equal, None) is first
    monkeypatch.setattr(Planner, "plan_of", None)  # called, it would fail
    assert searches.planner(equal, None).lowest() is lowest


def test_another_problem_or_limit_has_another_planner() -> None:
    searches, problem = Searches(), seeded_problem(3)
    first = searches.planner(problem, None)
    value = next(value.name for value in problem.values if value.in_forward)
    assert searches.planner(problem.with_facts(Assumptions(forward_bytes=((value, 8),))), None) is not first
    assert searches.planner(problem, 5.0) is not first


def test_a_planner_that_the_clock_has_ended_is_not_asked_again() -> None:
    searches, problem = Searches(), seeded_problem(3)
    ended = searches.planner(problem, None, lambda: True)
    assert ended.work.is_spent
    other = searches.planner(problem, None)
    assert other is not ended and not other.work.is_spent
    assert searches.planner(problem, None, lambda: True).work.is_spent, "each caller's clock counts"


def test_few_planners_are_kept_and_none_is_copied() -> None:
    searches = Searches()
    first, *others = (searches.planner(seeded_problem(seed), None) for seed in range(KEPT + 1))
    assert (
        searches.planner(first.problem, None) is not first and searches.planner(others[-1].problem, None) is others[-1]
    )
    for empty in (copy.deepcopy(searches), pickle.loads(pickle.dumps(searches))):
        assert empty.planner(others[-1].problem, None) is not others[-1]
    searches.clear()
    assert searches.planner(others[-1].problem, None) is not others[-1]
