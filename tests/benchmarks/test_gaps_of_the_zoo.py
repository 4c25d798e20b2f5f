"""Gaps taken apart: what a longer search finds is the plan's part, the rest the bound's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common.long_search import long_search
from benchmarks.digest import stored_problems
from benchmarks.zoo import gaps
from benchmarks.zoo.gaps import PartsRow
from compile_remat.passes import Planner, Problem

ROW = PartsRow("dit", "0.6", 60, 100, 40, 60, extra=0.05, bound=0.01, simulations=1, planning_s=0.1)
SEARCHED = replace(ROW, better=0.02, better_peak_bytes=60)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return stored_problems()["bert small"]


@pytest.mark.parametrize("share", [0.7, None])
def test_a_longer_search_keeps_the_budget_and_is_no_worse(problem: Problem, share: float | None) -> None:
    planner = Planner(problem)
    plan = planner.lowest() if share is None else planner.within(int(share * planner.fastest().peak_bytes))
    found = long_search(problem, plan, times=2)
    if share is None:
        assert found.peak_bytes <= plan.peak_bytes
    else:
        assert found.peak_bytes <= (plan.budget_bytes or 0)
        assert found.time_ns - planner.fastest_time_ns <= plan.extra_time_ns


def test_the_two_parts_of_a_gap() -> None:
    assert (round(SEARCHED.gap, 6), round(SEARCHED.plan_part, 6), round(SEARCHED.bound_part, 6)) == (0.04, 0.03, 0.01)
    assert (ROW.plan_part, round(ROW.bound_part, 6)) == (0.0, 0.04)  # nothing better was found, as nothing was sought
    lowest = replace(SEARCHED, setting=gaps.LOWEST, peak_bytes=50, better_peak_bytes=45)
    assert (round(lowest.gap, 6), round(lowest.plan_part, 6), round(lowest.bound_part, 6)) == (0.2, 0.1, 0.1)
    copy = replace(SEARCHED, setting=f"{gaps.COPY} 0", bound=0.05)
    assert copy.plan_part == 0.0


def test_verdicts_and_summary() -> None:
    rows = [gaps._judged(row) for row in (ROW, SEARCHED, replace(SEARCHED, setting=f"{gaps.COPY} 0", peak_bytes=66))]
    assert [row.verdict for row in rows] == [
        "ok",
        "miss: 3.0% of the step is the plan's",
        "miss: floor 10.00% above the lowest",
    ]
    assert "budgets: 2 rows; gap within 1% at 0 (0%)" in gaps.summary(rows)
    assert "plan's part within 1% at 1 (50%), worst 3.0%" in gaps.summary(rows)
    assert len(gaps.table(rows)[1]) == 2


def test_rows_of_a_small_graph(problem: Problem) -> None:
    rows = list(gaps.copy_rows("bert", gaps.cut_down(problem, 8)))
    assert len(rows) == gaps.POINTS
    assert all(row.plan_part == 0.0 for row in rows)  # few choices are planned to their optimum
    assert all(
        (row.better or 0.0) >= row.bound - 1e-9 for row in rows if (row.better_peak_bytes or 0) <= row.budget_bytes
    )
