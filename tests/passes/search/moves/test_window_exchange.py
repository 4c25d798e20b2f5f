"""Window exchange: of many plans the one of lowest score is found, and most of the others are not simulated."""

from __future__ import annotations

import numpy as np
import pytest

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.search.moves.local_search import LocalSearch
from compile_remat.passes.search.moves.window_exchange import lowest_scoring
from compile_remat.passes.search.options import SearchOptions
from tests.oracles.random_problems import Shape, chain, seeded_problem
from tests.passes.search.moves.test_local_search import search_of

LARGE = Shape(max_values=25, max_late=4, max_steps=20)
FEW_AT_A_TIME = SearchOptions(window_batch=4)


def random_plans(searcher: LocalSearch, seed: int, plans: int = 40) -> np.ndarray:
    simulator = searcher.simulator
    is_saved = np.random.default_rng(seed).random((simulator.num_values, plans)) < np.linspace(0.1, 0.9, plans)
    return (is_saved & simulator.is_saveable[:, None]) | searcher.pinned[:, None]


@pytest.mark.parametrize("seed", range(25))
def test_the_lowest_score_is_that_of_all_plans_simulated_together(seed: int) -> None:
    searcher = search_of(seeded_problem(seed, LARGE), FEW_AT_A_TIME)
    plans = random_plans(searcher, seed)
    batch = searcher.simulator.run(plans)
    peaks = batch.peak
    for budget_bytes in (0, int(np.median(peaks)), int(peaks.max())):
        for weight in (0.01, 3.0):
            scores = searcher.score(batch, budget_bytes, weight)
            assert lowest_scoring(searcher, plans, budget_bytes, weight) == int(np.argmin(scores))


def test_slower_plans_than_one_that_fits_are_not_simulated() -> None:
    searcher = search_of(chain(12), FEW_AT_A_TIME)
    plans = random_plans(searcher, seed=0)
    lowest_scoring(searcher, plans, int(searcher.simulator.run(plans).peak.max()), weight=1.0)
    assert searcher.simulations == FEW_AT_A_TIME.window_batch


def test_lengths_are_those_of_the_simulated_backwards() -> None:
    simulator = Simulator(seeded_problem(3, LARGE))
    saved = np.random.default_rng(0).random((simulator.num_values, 8)) < 0.5
    batch = simulator.run(saved)
    times, lengths = simulator.outlines(saved)
    assert times.tolist() == batch.time_ns.tolist()
    assert lengths.tolist() == (batch.step_slots[:, -1] + 1).tolist()
