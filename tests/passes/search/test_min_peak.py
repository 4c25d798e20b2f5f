"""Plans of low peak, quickly and less quickly found."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.digest import stored_problems
from compile_remat.passes import Planner
from compile_remat.passes.problem.work_budget import WorkBudget
from compile_remat.passes.search.min_peak import MinimumPeak
from compile_remat.passes.search.options import SearchOptions
from compile_remat.passes.search.strategy import Search
from tests.oracles.exact_plans import all_plans
from tests.oracles.random_problems import Shape, seeded_problem

SMALL = Shape(max_values=9, max_late=2, max_steps=8)
LARGE = Shape(max_values=60, max_late=6, max_steps=50)


@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_each_way_goes_lower_or_leaves_it(seed: int) -> None:
    search = Search(seeded_problem(seed, LARGE), WorkBudget())
    minimum_peak = MinimumPeak(search)
    levels = search.simulator.run(np.stack(search.levels, axis=1)).peak
    assert minimum_peak.unavoidable_bytes <= search.peak(minimum_peak.first) <= levels.min()
    lowest = min(search.peak(m) for m in minimum_peak.found)
    assert lowest <= search.peak(minimum_peak.first)
    near = [m for m in minimum_peak.found if search.peak(m) <= lowest / search.options.same_peak]
    assert any(m is minimum_peak.found[0] for m in near)  # what is called the lowest is the fastest of those
    assert search.time(minimum_peak.found[0]) == min(map(search.time, near))
    for mask in (minimum_peak.first, *minimum_peak.found):
        assert not (search.pinned & ~mask).any()


@pytest.mark.parametrize("uses_perturbation", [True, False])
def test_the_search_for_a_budget_takes_part_whatever_was_found_before(uses_perturbation: bool) -> None:
    """A U-Net's plan for a budget lay below what was called its lowest, as random neighbours had found nothing."""
    options = SearchOptions(uses_perturbation=uses_perturbation)
    for seed in (0, 6):
        search = Search(seeded_problem(seed, LARGE), WorkBudget(), options)
        found = MinimumPeak(search).found
        lowest = min(map(search.peak, found))
        target = int(options.floor_search_target * lowest)
        assert len(found) == 3 and min(map(search.peak, search.candidates(target))) >= lowest


def test_the_search_goes_on_below_the_lowest_peak_as_long_as_a_budget_there_is_met() -> None:
    """The first search for a budget misses a plan of a small recurrent model that lies an eighth below."""
    search = Search(stored_problems()["recurrent small"], WorkBudget())
    found = sorted(map(search.peak, MinimumPeak(search).found))
    assert len(found) > 2 and found[0] <= max(search.options.descent_targets) * found[1]
    for share in search.options.descent_targets:
        assert min(map(search.peak, search.candidates(int(share * found[0])))) >= found[0]


def test_a_plan_for_a_budget_just_below_the_lowest_peak_is_not_missed() -> None:
    """A WaveNet's plan for a budget lay 4.5 % below what was called its lowest: the only budget tried lay too far below."""
    problem = stored_problems()["wavenet"]
    lowest = Planner(problem).lowest()
    below = [Planner(problem).within(int(share * lowest.peak_bytes)) for share in (0.95, 0.98, 0.99)]
    assert min(plan.peak_bytes for plan in below) >= lowest.peak_bytes


def test_unavoidable_bytes_are_in_every_plan() -> None:
    for seed in range(20):
        problem = seeded_problem(seed, SMALL)
        assert Planner(problem).minimum_peak.unavoidable_bytes <= all_plans(problem).lowest_peak


def test_no_work_left_still_gives_a_plan() -> None:
    work = WorkBudget(limit_units=1)
    search = Search(seeded_problem(6, LARGE), work)
    minimum_peak = MinimumPeak(search)
    assert search.peak(minimum_peak.found[0]) == search.peak(minimum_peak.first)
