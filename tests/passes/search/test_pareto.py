"""Plans for many budgets, sought together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from compile_remat.passes import Link, Plan, Planner, Problem, curves, timeline
from compile_remat.passes.problem.work_budget import WORK
from tests.oracles.exact_plans import all_plans
from tests.oracles.random_problems import Shape, chain, seeded_problem
from tests.oracles.scaled import BYTES, TIMES, scaled

SMALL = Shape(max_values=9, max_late=2, max_steps=8)
LARGE = Shape(max_values=60, max_late=6, max_steps=50)


def fastest_within(plans: list[Plan], budget_bytes: int) -> int:
    return min(p.extra_time_ns for p in plans if p.peak_bytes <= budget_bytes)


@pytest.mark.parametrize(
    "seed", [0, 15, 30, 45, *(pytest.param(s, marks=pytest.mark.full) for s in range(0, 60, 3) if s % 15)]
)
def test_from_the_fastest_to_the_lowest_each_with_a_lower_peak(seed: int) -> None:
    problem = seeded_problem(seed, LARGE)
    plans = curves(Planner(problem), 12).best
    assert plans[0].extra_time_ns == Planner(problem).fastest().extra_time_ns
    assert plans[-1].peak_bytes == min(p.peak_bytes for p in plans) <= Planner(problem).lowest().peak_bytes
    for faster, lower in pairwise(plans):
        assert lower.peak_bytes < faster.peak_bytes
        assert lower.extra_time_ns >= faster.extra_time_ns
    for plan in plans:
        assert timeline(problem, plan).peak_bytes == plan.peak_bytes
        assert plan.budget_bytes is None or plan.is_feasible
        assert plan.bound_time_ns <= plan.extra_time_ns


def test_near_the_best_of_all_plans(is_full: bool) -> None:
    """Measured: at all of 194 budgets of 120 small problems as fast as the fastest plan there is."""
    equal = count = 0
    for seed in range(120 if is_full else 30):
        problem = seeded_problem(seed, SMALL)
        every, planner = all_plans(problem), Planner(problem)
        plans = curves(planner, 10).best
        floor, top = plans[-1].peak_bytes, plans[0].peak_bytes
        for budget_bytes in sorted({floor + (top - floor) * k // 9 for k in range(1, 9)} - {top}):
            best = every.fastest_within(budget_bytes)
            assert best is not None
            found = fastest_within(plans, budget_bytes)
            assert found >= best - int(every.times.min())
            count += 1
            equal += found == best - int(every.times.min())
    assert equal >= 0.9 * count, (equal, count)


def test_close_to_plans_sought_one_by_one(is_full: bool) -> None:
    for seed in range(0, 60, 6 if is_full else 24):
        problem = seeded_problem(seed, LARGE)
        plans = curves(Planner(problem), 10).best
        floor, top = plans[-1].peak_bytes, plans[0].peak_bytes
        apart = []
        for k in range(1, 9):
            budget_bytes = floor + (top - floor) * k // 9
            alone = Planner(problem).within(budget_bytes)
            apart.append((fastest_within(plans, budget_bytes) - alone.extra_time_ns) / max(1, problem.step_time_ns))
        assert float(np.median(apart)) <= 0.02, (seed, apart)


def test_nested_plans_stand_at_its_end() -> None:
    problem = chain(60, nbytes=1000, time_ns=10)
    plans = curves(Planner(problem), 12).best
    assert plans[-1].again
    assert plans[-1] == Planner(problem).lowest()


def test_the_same_in_every_process_and_for_few_points() -> None:
    problem = seeded_problem(6, LARGE)
    assert curves(Planner(problem), 9).best == curves(Planner(Problem.from_json(problem.to_json())), 9).best
    for points in (1, 2, 3):
        plans = curves(Planner(problem), points).best
        assert 1 <= len(plans) <= max(2, points)


def test_limited_work_still_gives_plans() -> None:
    problem = seeded_problem(6, LARGE)
    planner = Planner(problem, work_seconds=1e-6)
    plans = curves(planner, 10).best
    assert planner.ends == {WORK}
    assert plans[0].extra_time_ns == Planner(problem).fastest().extra_time_ns
    assert all(timeline(problem, plan).peak_bytes == plan.peak_bytes for plan in plans)


def test_copies_make_plans_faster_and_lower_than_those_that_keep_all() -> None:
    problem = scaled(chain(24))
    bytes_per_s = int(0.5 * 24 * BYTES * 10**9 / (24 * TIMES))
    found = curves(Planner(problem, link=Link(bytes_per_s, bytes_per_s, 1 << 50)), 6)
    assert [p.offloaded for p in found.kept] == [()] * len(found.kept)
    assert found.kept == curves(Planner(problem), 6).best
    for faster, lower in pairwise(found.best):
        assert lower.peak_bytes < faster.peak_bytes and lower.extra_time_ns >= faster.extra_time_ns
    moving = [plan for plan in found.best if plan.offloaded]
    assert found.best[-1] in moving and found.best[-1].peak_bytes < found.kept[-1].peak_bytes
    for plan in found.kept[1:]:
        assert fastest_within(found.best, plan.peak_bytes) <= plan.extra_time_ns
    assert any(p.stall_time_ns and fastest_within(found.kept, p.peak_bytes) > p.extra_time_ns for p in moving[:-1])


def test_without_a_link_both_curves_are_the_same() -> None:
    found = curves(Planner(scaled(chain(12))), 4)
    assert found.best == found.kept
