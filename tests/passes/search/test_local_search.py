"""Local search: it never makes a plan worse, and it leaves the pins alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.search.local_search import Polisher
from compile_remat.passes.search.min_cut import pinned_indices
from compile_remat.passes.search.options import SearchOptions
from tests.oracles import Shape, chain, seeded_problem

LARGE = Shape(max_values=25, max_late=4, max_steps=20)
SEEDS = range(25)
WHOLE = SearchOptions(max_moves=1200)


def polisher_of(problem: Problem, options: SearchOptions = WHOLE) -> Polisher:
    simulator = Simulator(problem)
    pinned = np.zeros(len(problem.values), dtype=bool)
    pinned[list(pinned_indices(problem))] = True
    order = np.argsort(simulator.position, kind="stable")
    pool = np.array([v for v in order if problem.values[v].is_saveable], dtype=np.int64)
    return Polisher(simulator, pool, pinned, 3.0, options)


def some_mask(problem: Problem, polisher: Polisher, seed: int) -> np.ndarray:
    saveable = np.array([v.is_saveable for v in problem.values])
    return (np.random.default_rng(seed).random(len(saveable)) < 0.5) & saveable | polisher.pinned


def score(polisher: Polisher, mask: np.ndarray, budget_bytes: int) -> float:
    return float(polisher.score(polisher.simulator.run(mask[:, None]), budget_bytes, polisher.weight)[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_never_worse(seed: int) -> None:
    problem = seeded_problem(seed, LARGE)
    polisher = polisher_of(problem)
    mask = some_mask(problem, polisher, seed)
    high = int(polisher.simulator.run(mask[:, None]).peak[0])
    for budget_bytes in (0, high // 2, high, 2 * high):
        scores = [score(polisher, polisher.run(mask, budget_bytes, rounds), budget_bytes) for rounds in range(4)]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] == score(polisher, mask, budget_bytes)


@pytest.mark.parametrize("seed", SEEDS)
def test_touches_only_what_is_free(seed: int) -> None:
    problem = seeded_problem(seed, LARGE)
    polisher = polisher_of(problem)
    mask = some_mask(problem, polisher, seed)
    before = mask.copy()
    result = polisher.run(mask, int(polisher.simulator.run(mask[:, None]).peak[0]) // 2, 3)
    assert (mask == before).all()
    assert (result | ~polisher.pinned).all()
    assert all(problem.values[v].is_saveable for v in np.flatnonzero(result))


def test_ends_where_no_single_move_helps() -> None:
    problem = seeded_problem(7, LARGE)
    polisher = polisher_of(problem)
    result = polisher.run(some_mask(problem, polisher, 7), 20, rounds=100)
    best = score(polisher, result, 20)
    known = polisher.simulator.run(result[:, None])
    for v in polisher.pool:
        if not polisher.pinned[v] and (known.used | known.recomputed)[v, 0]:
            other = result.copy()
            other[v] ^= True
            assert score(polisher, other, 20) >= best - 0.5


def test_mending_one_of_two_equal_peaks_is_a_gain() -> None:
    """Same time, same maximum: only the mean square tells that one of the two places is mended."""
    live = np.array([[5, 1, 5], [5, 1, 1], [3, 1, 3]])
    batch: Any = SimpleNamespace(live=live, peak=live.max(axis=1), time_ns=np.array([7, 7, 7]))
    both, one, none = polisher_of(chain(3)).score(batch, 3, 1.0)
    assert both > one > none == 7.0


def test_excess_is_what_the_score_weighs() -> None:
    polisher = polisher_of(chain(6))
    mask = np.ones(6, dtype=bool)
    batch = polisher.simulator.run(mask[:, None])
    peak = int(batch.peak[0])
    assert score(polisher, mask, peak) == 0.0
    over = np.maximum(batch.live[0] - (peak - 2), 0)
    expected = polisher.weight * (2 + 0.2 * np.sqrt((over**2).mean()))
    assert score(polisher, mask, peak - 2) == pytest.approx(expected)


def test_moves_are_flips_and_near_swaps() -> None:
    polisher = polisher_of(chain(20))
    mask = np.zeros(20, dtype=bool)
    mask[10] = True
    moves = polisher._moves(mask, polisher.simulator.run(mask[:, None]), 0)
    assert sorted(v for v, partner in moves.tolist() if partner < 0) == list(range(20))
    swaps = {(v, w) for v, w in moves.tolist() if w >= 0}
    assert swaps == {(10, w) for w in range(10 - WHOLE.swap_distance, 11 + WHOLE.swap_distance) if w != 10}
    few = polisher_of(chain(20), SearchOptions(max_moves=24))._moves(mask, polisher.simulator.run(mask[:, None]), 0)
    assert len(few) <= 24


def test_moves_made_together_stand_apart() -> None:
    polisher = polisher_of(chain(20))
    chosen = polisher._far_apart(np.array([(v, -1) for v in range(20)]))
    places = [v for v, _ in chosen]
    assert places == list(range(0, 20, WHOLE.move_distance))


def test_counts_the_plans_it_tries() -> None:
    polisher = polisher_of(chain(10))
    mask = np.ones(10, dtype=bool)
    polisher.run(mask, 5, 2)
    first, polisher.simulations = polisher.simulations, 0
    polisher.run(mask, 5, 2)
    assert first == polisher.simulations > 0


def test_a_round_costs_the_same_on_a_large_graph() -> None:
    """Turn by turn, every move is tried once."""
    problem = chain(60)
    polisher = polisher_of(problem)
    mask = some_mask(problem, polisher, 0)
    batch = polisher.simulator.one(mask)
    every = polisher._moves(mask, batch, 0)
    cells = len(problem.values) + len(problem.steps)
    options = replace(WHOLE, move_cells=(len(every) // 3) * cells, min_moves=1)
    polisher = polisher_of(problem, options)
    parts = [polisher._moves(mask, batch, turn) for turn in range(4)]
    assert max(map(len, parts)) <= len(every) // 3
    assert sorted(map(tuple, np.concatenate(parts).tolist())) == sorted(map(tuple, every.tolist()))
    assert polisher._moves(mask, batch, 4).tolist() == parts[0].tolist()
    polisher = polisher_of(problem, replace(options, min_moves=len(every)))
    assert polisher._moves(mask, batch, 0).tolist() == every.tolist()
