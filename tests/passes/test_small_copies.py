"""Plans of small copies of real graphs against the fastest of all plans, and a graph whose floor was once out of reach."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import models
from benchmarks.common.exact import cut_down, exact_front, free_choices
from benchmarks.gap import BRANCHING, GAP_LIMIT
from benchmarks.models.branching import Recurrent
from compile_remat.api import look
from compile_remat.passes import Planner, Problem
from tests.oracles.exact_plans import all_plans
from tests.oracles.random_problems import seeded_problem

FREE = 8


def problem_of(name: str) -> Problem:
    case = models.build(name, scale=models.TOY_SCALE)
    return look(case.module, case.inputs, memory_budget="max")[0].problem


@pytest.mark.parametrize("name", BRANCHING)
def test_plans_of_branching_models_are_near_the_optimum(name: str) -> None:
    """At every budget that one plan fits and another does not; the bound never lies above the optimum."""
    problem = cut_down(problem_of(name), FREE)
    assert len(free_choices(problem)) == FREE
    front = exact_front(problem)
    for budget_bytes in front.peaks.tolist():
        best = front.fastest_ns(budget_bytes)
        assert best is not None
        plan = Planner(problem).within(budget_bytes)
        optimum = best - int(front.times[-1])
        assert plan.bound_time_ns <= optimum
        assert plan.peak_bytes <= 1.01 * budget_bytes
        assert plan.extra_time_ns - optimum <= GAP_LIMIT * problem.step_time_ns, (
            budget_bytes,
            plan.extra_time_ns,
            optimum,
        )


@pytest.mark.parametrize("seed", range(0, 30, 6))
def test_the_front_is_that_of_all_plans(seed: int) -> None:
    problem = seeded_problem(seed)
    front, plans = exact_front(problem), all_plans(problem)
    assert front.peaks[0] == plans.lowest_peak
    assert (np.diff(front.peaks) > 0).all() and (np.diff(front.times) < 0).all()
    for budget_bytes in range(plans.lowest_peak - 1, int(plans.peaks.max()) + 1):
        assert front.fastest_ns(budget_bytes) == plans.fastest_within(budget_bytes)


def test_too_many_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="free choices"):
        exact_front(problem_of("gpt"))


def test_the_state_of_an_unrolled_cell_is_a_buffer() -> None:
    """Products that stay in registers read it for the next step's kernel; without a buffer of its own every gradient before it
    would seem alive to the end, and the floor would stand at 0.8 of the default peak."""
    torch.manual_seed(0)
    problem = look(Recurrent(16), (torch.randn(16, 64, 16),), memory_budget="max")[0].problem
    planner = Planner(problem)
    assert planner.lowest().peak_bytes < 0.4 * planner.torch_default(None).peak_bytes
