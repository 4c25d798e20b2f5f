"""Further starts of the search: the ladder of budgets, long moves, kicks; all deterministic, none worse than its start."""

from __future__ import annotations

import numpy as np
import pytest

from compile_remat.passes import Planner, kicks
from compile_remat.passes.crossover import cross
from compile_remat.passes.descent import STEP, Descent
from tests.oracles import Shape, all_plans, chain, seeded_problem

LARGE = Shape(max_values=16, max_late=3, max_steps=12)


@pytest.mark.parametrize("seed", range(0, 40, 5))
def test_a_start_does_not_depend_on_what_was_asked_before(seed: int) -> None:
    planner = Planner(seeded_problem(seed, LARGE))
    top = planner.fastest().peak_bytes
    fresh = Descent(planner._polisher, planner.levels, top).start(top // 2)
    used = Descent(planner._polisher, planner.levels, top)
    used.start(top // 4)
    assert (used.start(top // 2) == fresh).all()


def test_the_ladder_goes_down_as_far_as_the_budget() -> None:
    planner = Planner(chain(40))
    descent = Descent(planner._polisher, planner.levels, 40)
    start = descent.start(20)
    assert [target for target, _ in descent.rungs] == [40, 34, 29, 25, 21]
    assert descent.rungs[-1][0] * STEP <= 20
    assert planner._peak(start) < planner.fastest().peak_bytes


@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_a_long_move_never_scores_worse(seed: int) -> None:
    planner = Planner(seeded_problem(seed, LARGE))
    budget_bytes = planner.fastest().peak_bytes * 3 // 4
    for level in planner.levels:
        crossed = cross(planner._polisher, level, planner.levels, budget_bytes, 1.0)
        assert planner._score(crossed, budget_bytes) <= planner._score(level, budget_bytes)
        assert (crossed | ~planner.pinned).all()


def test_a_kick_finds_what_flips_and_swaps_do_not() -> None:
    """Measured: over 300 problems, the richest level's kicks end at the lowest peak of any plan in all but 6."""
    missed = 0
    for seed in range(300):
        problem = seeded_problem(seed)
        planner = Planner(problem)
        found = kicks.lower(planner._polisher, planner.levels[0], rounds=3, weight_factor=10.0)
        assert planner._peak(found) <= planner._peak(planner.levels[0])
        again = kicks.lower(planner._polisher, planner.levels[0], rounds=3, weight_factor=10.0)
        assert (found == again).all()
        missed += planner._peak(found) > all_plans(problem).lowest_peak
        assert not np.any(planner.pinned & ~found)
    print("MISSED", missed)
    assert missed <= 15
