"""Offers: what a graph could run under beside others."""

from __future__ import annotations

import pytest

from compile_remat.passes import Planner, Problem, Step, Value, plan_options
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE
from tests.oracles.random_problems import Shape, seeded_problem


@pytest.mark.parametrize("seed", range(12))
def test_no_offer_is_better_than_another_in_everything_and_both_ends_are_there(seed: int) -> None:
    planner = Planner(seeded_problem(seed, Shape(max_values=14, max_steps=9)))
    found = plan_options(planner)
    figures = [(o.time_ns, o.held_bytes, o.peak_bytes, o.forward_peak_bytes, o.kept_output_bytes) for o in found]
    for a in figures:
        assert not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in figures)
    assert [o.time_ns for o in found] == sorted(o.time_ns for o in found)
    assert found[0].time_ns == 0
    assert min(o.peak_bytes for o in found) <= planner.lowest().peak_bytes
    fewest = min(cut.saved_bytes for cut in planner.search.hull)
    assert min(o.held_bytes for o in found) <= fewest + planner.simulator.output_bytes


@pytest.mark.parametrize("seed", range(12))
def test_figures_are_those_of_the_plan_that_the_names_make(seed: int) -> None:
    problem = seeded_problem(seed, Shape(max_values=14, max_steps=9, with_memory_of_kernels=True))
    planner = Planner(problem)
    for option in plan_options(planner):
        plan = planner.plan_of(planner.mask_of(option.saved), None)
        assert plan.saved == option.saved
        assert (plan.held_bytes, plan.peak_bytes) == (option.held_bytes, option.peak_bytes)
        assert (plan.forward_peak_bytes, plan.extra_time_ns) == (option.forward_peak_bytes, option.time_ns)


def test_copies_of_inputs_lie_between_forward_and_backward() -> None:
    """One that a step reads in every plan, and one that a value is computed from, where it is computed once more."""
    values = (Value("a", 8, EXTERN, (), 9), Value("p", 4, POINTWISE, (0,), 1, position=1, held_bytes=32))
    steps = (
        Step("g0", 4, EXTERN, (1,), (), is_output=True, held_bytes=16),
        Step("output", 0, CONSTANT, (), (0,)),
    )
    planner = Planner(Problem(values, steps, 20))
    held = {names: planner.plan_of(planner.mask_of(names), None).held_bytes for names in [(), ("a",), ("p",)]}
    assert held == {(): 32 + 16, ("a",): 8 + 32 + 16, ("p",): 4 + 16}
    assert {option.saved: option.held_bytes for option in plan_options(planner)}.items() <= held.items()
