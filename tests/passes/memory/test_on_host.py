"""Live bytes of plans with copies: what the copies' own timetable says, and a chain by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import synthetic
from compile_remat.passes import Link, Offloaded, Planner, Problem
from compile_remat.passes.memory.on_host import live_on_device
from compile_remat.passes.memory.plan_timeline import candidate_of
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, Step, Value
from tests.oracles.random_problems import problems
from tests.oracles.scaled import BYTES, scaled

CHAIN = Problem(
    (
        Value("a", 10, EXTERN, (), 1),
        Value("b", 20, EXTERN, (0,), 1, position=1),
        Value("out", 5, EXTERN, (1,), 1, position=2, is_output=True),
    ),
    (
        Step("g0", 4, EXTERN, (1,), (), 1),
        Step("g1", 8, EXTERN, (0,), (0,), 1, is_output=True),
        Step("output", 0, CONSTANT, (), (1,)),
    ),
    5,
)
"""a -> b -> out in the forward; in the backward `g0` reads b, then `g1` reads `g0` and a and is returned."""


def test_a_chain_by_hand() -> None:
    kept = candidate_of(CHAIN, ["a", "b"], ())
    live = live_on_device(kept, [Offloaded("a", "out", "g1")])
    assert live.forward.tolist() == [10, 30, 25, 25]
    assert live.backward.tolist() == [29, 27, 13]  # out, b and g0; then out, a, g0 and g1
    assert live.peak_bytes == 30 < kept.peak_bytes == 39


def test_without_a_place_a_value_leaves_at_the_end_and_returns_for_its_first_reader() -> None:
    kept = candidate_of(CHAIN, ["a", "b"], ())
    live = live_on_device(kept, [Offloaded("a")])
    assert (live.forward - live_on_device(kept, ()).forward).tolist() == [0, 0, 0, -10]
    assert (live.backward - live_on_device(kept, ()).backward).tolist() == [-10, 0, 0]


@pytest.mark.parametrize("name", ["out", "nothing"])
def test_a_value_that_cannot_leave_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no buffer of its own"):
        live_on_device(candidate_of(CHAIN, ["a", "b"], ()), [Offloaded(name)])


@given(problems, st.sampled_from([2, 20, 1000]), st.floats(0.3, 0.95))
def test_a_plan_with_copies_has_the_peak_of_its_timetable(problem: Problem, rate: int, part: float) -> None:
    problem = scaled(problem)
    link = Link(rate * 10**3 * BYTES, rate * 10**3 * BYTES, 1 << 50)
    planner = Planner(problem, link=link)
    check(problem, planner, int(part * planner.fastest().peak_bytes))


@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
def test_layers_with_copies_have_the_peak_of_their_timetable(part: float) -> None:
    problem = synthetic.equal_layers(8)
    planner = Planner(problem, link=Link(50 * 10**9, 50 * 10**9, 1 << 50))
    assert check(problem, planner, int(part * planner.fastest().peak_bytes)) > 0


def check(problem: Problem, planner: Planner, budget_bytes: int) -> int:
    """Compare a plan's live bytes with the peak that its search gave it; returns the number of values that it moves."""
    plan = planner.within(budget_bytes)
    live = live_on_device(candidate_of(problem, plan.saved, plan.again), plan.offloaded)
    assert live.peak_bytes == plan.peak_bytes
    return len(plan.offloaded)
