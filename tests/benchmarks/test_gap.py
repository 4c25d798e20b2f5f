"""Plans of small copies against all plans."""

from __future__ import annotations

import pytest

from benchmarks import gap
from benchmarks.common.exact import cut_down, exact_front
from benchmarks.digest import stored_problems
from compile_remat.passes import Planner, SearchOptions


@pytest.mark.parametrize("name", ["gpt small", "bert small"])
def test_few_choices_are_planned_to_their_optimum(name: str) -> None:
    problem = cut_down(stored_problems()[name], 14)
    front = exact_front(problem)
    low, high = int(front.peaks[0]), int(front.peaks[-1])
    slower = 0
    for budget_bytes in (low + (high - low) * k // gap.POINTS for k in range(gap.POINTS)):
        best_ns = front.fastest_ns(budget_bytes)
        assert best_ns is not None
        best_ns -= int(front.times[-1])
        assert Planner(problem).within(budget_bytes).extra_time_ns <= best_ns, budget_bytes
        without = SearchOptions(branch_values=0)
        slower += Planner(problem, options=without).within(budget_bytes).extra_time_ns > best_ns
    assert slower  # the copy needs branch and bound
