"""Problems that cannot be planned for are refused by name; what can be is planned for, however odd."""

from __future__ import annotations

import pytest

from compile_remat.passes import Planner, Problem, Status, Step, Value
from compile_remat.passes.problem.problem import CONSTANT, EXTERN

STEP, RETURN = Step("g", 4, EXTERN, (0,), ()), Step("output", 0, CONSTANT, (), (0,))


def value(name: str, reads: tuple[int, ...] = (), nbytes: int = 4) -> Value:
    return Value(name, nbytes, EXTERN, reads, 1)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem((), ()), "has no backward step"),
        (Problem((value("a"),), ()), "has no backward step"),
        (
            Problem((value("a", (1,)), value("b", (0,))), (STEP, RETURN)),
            "a reads node 1, which is not computed before it",
        ),
        (Problem((value("a", (0,)),), (STEP, RETURN)), "a reads node 0, which is not computed before it"),
        (Problem((value("a", (7,)),), (STEP, RETURN)), "a reads node 7, which is not computed before it"),
        (Problem((value("a"),), (Step("g", 4, EXTERN, (0,), (1,)), Step("h", 4, EXTERN, (), (0,)))), "g reads node 1"),
        (Problem((value("a"),), (Step("g", 4, EXTERN, (3,), ()), RETURN)), "g reads node 3"),
        (Problem((value("a", nbytes=-4),), (STEP, RETURN)), "a has a negative size or time"),
    ],
    ids=["empty", "no-steps", "cycle", "itself", "unknown", "cycle-of-steps", "step-unknown", "negative"],
)
def test_what_cannot_be_planned_for_is_refused(problem: Problem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Planner(problem)


def test_a_backward_that_reads_nothing_has_one_plan() -> None:
    plan = Planner(Problem((), (Step("g", 4, EXTERN, (), ()), RETURN))).within(10)
    assert (plan.status, plan.saved, plan.peak_bytes) == (Status.OPTIMAL, (), 4)


@pytest.mark.parametrize("budget_bytes", [0, -5])
def test_a_budget_that_nothing_meets_gets_the_lowest_plan_and_says_so(budget_bytes: int) -> None:
    plan = Planner(Problem((value("a"),), (STEP, RETURN))).within(budget_bytes)
    assert (plan.status, plan.is_feasible, plan.peak_bytes) == (Status.OVER_BUDGET, False, 8)
    assert plan.least_peak_bytes == 8
