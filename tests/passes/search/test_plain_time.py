"""The step of plain torch.compile, and a plan's step on the same scale."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_remat.passes import Planner, Problem, Step, Value, plain_option, plain_time_ns
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE
from tests.oracles.random_problems import Shape, seeded_problem

VALUES = (
    Value("a", 8, EXTERN, (), 90),
    Value("p", 8, POINTWISE, (0,), 3, save_time_ns=7, position=1),
)
STEPS = (Step("g0", 4, EXTERN, (1,), (), is_output=True), Step("output", 0, CONSTANT, (), (0,)))
PROBLEM = Problem(VALUES, STEPS, 200)


@pytest.mark.parametrize(
    ("saved", "time_ns"), [((0,), 200 + 3), ((1,), 200 + 7), ((0, 1), 200 + 7)], ids=["computed again", "saved", "both"]
)
def test_what_torch_saves_and_computes_again_is_in_its_time(saved: tuple[int, ...], time_ns: int) -> None:
    assert plain_time_ns(replace(PROBLEM, reference=saved)) == time_ns
    assert plain_time_ns(PROBLEM) is None


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_time_of_the_option(seed: int) -> None:
    problem = seeded_problem(seed, Shape(max_values=14, max_steps=9))
    saveable = tuple(v for v, value in enumerate(problem.values) if value.is_saveable)
    problem = replace(problem, reference=saveable)
    if saveable:
        expected_ns = problem.step_time_ns + plain_option(problem).time_ns
        assert plain_time_ns(problem) == expected_ns


def test_a_plan_that_does_what_torch_does_takes_no_extra_time() -> None:
    """This holds even if another plan is faster."""
    problem = replace(PROBLEM, reference=(1,))
    planner = Planner(problem)
    for saved, extra_ns, share in ((("p",), 4, 0), (("a",), 0, -4 / 207)):
        plan = planner.plan_of(planner.mask_of(saved), None)
        assert (plan.time_ns, plan.extra_time_ns) == (203 + extra_ns, extra_ns)
        assert plan.base.share_of(plan.time_ns) == extra_ns / 203 and plan.base.name == "the fastest plan"
        known = replace(plan, plain_time_ns=plain_time_ns(problem))
        assert known.extra_share == share and known.base.name == "plain torch.compile"
        assert known.extra_share - known.bound_share == pytest.approx(
            (plan.extra_time_ns - plan.bound_time_ns) / known.base.time_ns
        )
