"""The bound with moments against all plans of small problems."""

from __future__ import annotations

import pytest

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.search.bounds.moments import Moments
from compile_remat.passes.search.bounds.programme import Programme
from tests.oracles import AllPlans, Shape, all_plans, seeded_problem

SHAPES = (
    Shape(max_values=9, max_late=3, max_steps=9),
    Shape(max_values=7, max_late=0, max_steps=12, extern_only=True),
    Shape(max_values=10, max_late=0, max_steps=4),
)


def budgets(plans: AllPlans) -> range:
    """Every budget from the lowest peak of any plan to the one of the fastest."""
    return range(plans.lowest_peak, int(plans.peaks[plans.times == plans.times.min()].min()) + 1)


@pytest.mark.parametrize("shape", SHAPES, ids=["mixed", "extern", "forward"])
def test_no_plan_is_faster_than_the_bound_with_every_moment(shape: Shape, request: pytest.FixtureRequest) -> None:
    for seed in range(200 if request.config.getoption("--full") else 40):
        problem = seeded_problem(seed, shape)
        plans, simulator = all_plans(problem), Simulator(problem)
        programme, moments = Programme(simulator), Moments(simulator)
        for b in range(simulator.num_steps):
            moments.backward(programme, b)
        for place in range(simulator.num_values + 1):
            moments.forward(programme, place)
        for budget_bytes in list(budgets(plans))[::2]:
            best = plans.fastest_within(budget_bytes)
            assert best is not None
            bound = programme.proven_ns(programme.solve(budget_bytes).multipliers, budget_bytes)
            assert bound <= best, (seed, budget_bytes)
            whole, _ = programme.branch(budget_bytes, most_nodes=1000)
            assert bound <= whole <= best, (seed, budget_bytes)
