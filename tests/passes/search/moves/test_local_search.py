"""Local search: it never makes a plan worse, and it leaves the pins alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.search.min_cut import pinned_indices
from compile_remat.passes.search.moves.local_search import LocalSearch
from compile_remat.passes.search.options import SearchOptions
from compile_remat.passes.search.pareto_archive import ParetoArchive
from tests.oracles.random_problems import Shape, chain, seeded_problem

LARGE = Shape(max_values=25, max_late=4, max_steps=20)
SEEDS = range(25)
WHOLE = SearchOptions(max_moves=1200)


def search_of(problem: Problem, options: SearchOptions = WHOLE) -> LocalSearch:
    simulator = Simulator(problem)
    pinned = np.zeros(len(problem.values), dtype=bool)
    pinned[list(pinned_indices(problem))] = True
    order = np.argsort(simulator.position, kind="stable")
    pool = np.array([v for v in order if problem.values[v].is_saveable], dtype=np.int64)
    return LocalSearch(simulator, pool, pinned, 3.0, options)


def some_mask(problem: Problem, searcher: LocalSearch, seed: int) -> np.ndarray:
    saveable = np.array([v.is_saveable for v in problem.values])
    return (np.random.default_rng(seed).random(len(saveable)) < 0.5) & saveable | searcher.pinned


def score(searcher: LocalSearch, mask: np.ndarray, budget_bytes: int) -> float:
    return float(searcher.score(searcher.simulator.run(mask[:, None]), budget_bytes, searcher.weight)[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_never_worse_and_touches_only_what_is_free(seed: int) -> None:
    problem = seeded_problem(seed, LARGE)
    searcher = search_of(problem)
    mask = some_mask(problem, searcher, seed)
    high = int(searcher.simulator.run(mask[:, None]).peak[0])
    for budget_bytes in (0, high // 2, high, 2 * high):
        before = mask.copy()
        found = [searcher.run(mask, budget_bytes, rounds) for rounds in range(4)]
        scores = [score(searcher, result, budget_bytes) for result in found]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] == score(searcher, mask, budget_bytes)
        assert (mask == before).all() and all((result | ~searcher.pinned).all() for result in found)
        assert all(problem.values[v].is_saveable for result in found for v in np.flatnonzero(result))


@pytest.mark.parametrize("seed", SEEDS)
def test_moves_that_take_too_much_time_are_not_simulated(seed: int) -> None:
    problem = seeded_problem(seed, LARGE)
    searcher, all_of_them = search_of(problem), search_of(problem)
    all_of_them.archive = ParetoArchive()  # which wants to see every plan
    mask = some_mask(problem, searcher, seed)
    budget_bytes = int(searcher.simulator.run(mask[:, None]).peak[0])
    found, expected = (each.run(mask, budget_bytes, rounds=3) for each in (searcher, all_of_them))
    assert score(searcher, found, budget_bytes) == score(searcher, expected, budget_bytes)
    assert searcher.simulations < all_of_them.simulations


def test_moves_whose_saved_bytes_alone_exceed_the_budget_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried() -> tuple[list[float], int]:
        scores, simulations = [], 0
        for seed in SEEDS:
            problem = seeded_problem(seed, LARGE)
            searcher = search_of(problem)
            mask = some_mask(problem, searcher, seed)
            budget_bytes = int(0.9 * searcher.simulator.run(mask[:, None]).peak[0])
            scores.append(score(searcher, searcher.run(mask, budget_bytes, rounds=3), budget_bytes))
            simulations += searcher.simulations
        return scores, simulations

    scores, simulations = tried()
    at_least = Simulator.at_least
    monkeypatch.setattr(Simulator, "at_least", lambda self, saved: (at_least(self, saved)[0], np.int64(0)))
    expected, all_of_them = tried()
    assert scores == expected and simulations < all_of_them


def test_ends_where_no_single_move_helps() -> None:
    problem = seeded_problem(7, LARGE)
    searcher = search_of(problem)
    result = searcher.run(some_mask(problem, searcher, 7), 20, rounds=100)
    best = score(searcher, result, 20)
    known = searcher.simulator.run(result[:, None])
    for v in searcher.pool:
        if not searcher.pinned[v] and (known.used | known.recomputed)[v, 0]:
            other = result.copy()
            other[v] ^= True
            assert score(searcher, other, 20) >= best - 0.5


def test_mending_one_of_two_equal_peaks_is_a_gain() -> None:
    """Same time, same maximum: only the mean square tells that one of the two places is mended."""
    live = np.array([[5, 1, 5], [5, 1, 1], [3, 1, 3]])
    batch: Any = SimpleNamespace(live=live, peak=live.max(axis=1), time_ns=np.array([7, 7, 7]))
    both, one, none = search_of(chain(3)).score(batch, 3, 1.0)
    assert both > one > none == 7.0


def test_excess_is_what_the_score_weighs() -> None:
    searcher = search_of(chain(6))
    mask = np.ones(6, dtype=bool)
    batch = searcher.simulator.run(mask[:, None])
    peak = int(batch.peak[0])
    assert score(searcher, mask, peak) == 0.0
    over = np.maximum(batch.live[0] - (peak - 2), 0)
    expected = searcher.weight * (2 + 0.2 * np.sqrt((over**2).mean()))
    assert score(searcher, mask, peak - 2) == pytest.approx(expected)


def test_moves_are_flips_and_near_swaps() -> None:
    searcher = search_of(chain(20))
    mask = np.zeros(20, dtype=bool)
    mask[10] = True
    moves = searcher._moves(mask, searcher.simulator.run(mask[:, None]), 0)
    assert sorted(v for v, partner in moves.tolist() if partner < 0) == list(range(20))
    swaps = {(v, w) for v, w in moves.tolist() if w >= 0}
    assert swaps == {(10, w) for w in range(10 - WHOLE.swap_distance, 11 + WHOLE.swap_distance) if w != 10}
    few = search_of(chain(20), SearchOptions(max_moves=24))._moves(mask, searcher.simulator.run(mask[:, None]), 0)
    assert len(few) <= 24


def test_a_plan_without_swaps_has_flips_beyond_the_most_moves() -> None:
    """If no value is saved there is no swap: the code divided by zero in graphs with more free values than moves."""
    searcher = search_of(chain(20), SearchOptions(max_moves=10))
    nothing = np.zeros(20, dtype=bool)
    moves = searcher._moves(nothing, searcher.simulator.run(nothing[:, None]), 0)
    assert sorted(moves.tolist()) == [[v, -1] for v in range(20)]


def test_moves_made_together_stand_apart() -> None:
    searcher = search_of(chain(20))
    chosen = searcher._far_apart(np.array([(v, -1) for v in range(20)]))
    places = [v for v, _ in chosen]
    assert places == list(range(0, 20, WHOLE.move_distance))


def test_a_round_costs_the_same_on_a_large_graph() -> None:
    """Turn by turn, every move is tried once."""
    problem = chain(60)
    searcher = search_of(problem)
    mask = some_mask(problem, searcher, 0)
    batch = searcher.simulator.one(mask)
    every = searcher._moves(mask, batch, 0)
    cells = len(problem.values) + len(problem.steps)
    options = replace(WHOLE, move_cells=(len(every) // 3) * cells, min_moves=1)
    searcher = search_of(problem, options)
    parts = [searcher._moves(mask, batch, turn) for turn in range(4)]
    assert max(map(len, parts)) <= len(every) // 3
    assert sorted(map(tuple, np.concatenate(parts).tolist())) == sorted(map(tuple, every.tolist()))
    assert searcher._moves(mask, batch, 4).tolist() == parts[0].tolist()
    searcher = search_of(problem, replace(options, min_moves=len(every)))
    assert searcher._moves(mask, batch, 0).tolist() == every.tolist()
