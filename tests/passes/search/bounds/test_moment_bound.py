"""The bound with moments against all plans of small problems."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.search.bounds.moment_bound import MomentBound
from compile_remat.passes.search.bounds.moments import Moments
from compile_remat.passes.search.bounds.programme import Programme
from compile_remat.passes.search.options import DEFAULT
from tests.oracles.exact_plans import all_plans
from tests.oracles.random_problems import Shape, chain, seeded_problem

SHAPES = (
    Shape(max_values=9, max_late=3, max_steps=9),
    Shape(max_values=7, max_late=0, max_steps=12, extern_only=True),
    Shape(max_values=10, max_late=0, max_steps=4),
    Shape(max_values=9, max_late=2, max_steps=9, with_memory_of_kernels=True),
)


@pytest.mark.parametrize("shape", SHAPES, ids=["mixed", "extern", "forward", "kernels"])
def test_no_plan_is_faster_than_the_bound_with_every_moment(shape: Shape, is_full: bool) -> None:
    for seed in range(200 if is_full else 40):
        problem = seeded_problem(seed, shape)
        plans, simulator = all_plans(problem), Simulator(problem)
        programme, moments = Programme(simulator), Moments(simulator)
        for b in range(simulator.num_steps):
            moments.backward(programme, b)
        for place in range(simulator.num_values + 1):
            moments.forward(programme, place)
        for budget_bytes in list(plans.budgets)[::2]:
            best = plans.fastest_within(budget_bytes)
            assert best is not None
            bound = programme.proven_ns(programme.solve(budget_bytes).multipliers, budget_bytes)
            assert bound <= best, (seed, budget_bytes)
            whole, _ = programme.branch(budget_bytes, most_nodes=1000)
            assert bound <= whole <= best, (seed, budget_bytes)


def test_moments_end_where_the_last_ones_raised_the_bound_little() -> None:
    problem = chain(60)
    nothing = np.zeros(len(problem.values), dtype=bool)
    work, bounds = [], []
    for gain in (0.0, 1.0):
        simulator = Simulator(problem)
        bound = MomentBound(simulator, nothing, replace(DEFAULT, moment_gain=gain))
        assert not bound.branches
        bounds.append(bound.proof(30).least_time_ns)
        work.append(simulator.work.spent_units)
    assert work[1] < work[0]
    assert 0 < bounds[1] <= bounds[0]


def test_more_than_one_moment_of_each_graph_only_while_their_bound_is_not_enough() -> None:
    problem = chain(60)
    nothing = np.zeros(len(problem.values), dtype=bool)
    all_of_them = MomentBound(Simulator(problem), nothing).proof(30)
    assert not all_of_them.may_rise
    simulator = Simulator(problem)
    bound = MomentBound(simulator, nothing)
    quick = bound.proof(30, enough_ns=1)
    assert quick.may_rise and 1 <= quick.least_time_ns <= all_of_them.least_time_ns and quick.starts
    spent = simulator.work.spent_units
    assert bound.proof(30, enough_ns=quick.least_time_ns) is quick and simulator.work.spent_units == spent
    assert bound.proof(30, enough_ns=quick.least_time_ns + 1).least_time_ns == all_of_them.least_time_ns
    assert simulator.work.spent_units > spent


def test_branches_that_run_out_of_time_prove_less_and_nothing_wrong() -> None:
    proven = []
    for seed in range(20):
        problem = seeded_problem(seed, SHAPES[0])
        plans = all_plans(problem)
        budget_bytes = plans.budgets[0]
        best = plans.fastest_within(budget_bytes)
        for seconds in (0.0, math.inf):
            options = replace(DEFAULT, moment_excess=1.0, branch_seconds=seconds)
            bound = MomentBound(Simulator(problem), np.zeros(len(problem.values), dtype=bool), options)
            assert bound.branches
            proven.append(bound.proof(budget_bytes).least_time_ns)
        assert best is not None and proven[-2] <= proven[-1] <= best
    assert sum(proven[::2]) < sum(proven[1::2])
