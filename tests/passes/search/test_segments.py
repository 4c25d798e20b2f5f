"""Spans: where they cut, what their options predict, what the programme makes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.search.min_cut import CutSolver, hull, pinned_indices
from compile_remat.passes.search.segments import Segments
from tests.oracles.random_problems import Shape, chain, seeded_problem

LARGE = Shape(max_values=40, max_late=6, max_steps=30)
SEEDS = range(25)


def segments_of(problem: Problem) -> Segments:
    """Segments with their options, from the hull's levels."""
    simulator = Simulator(problem)
    pinned = np.zeros(len(problem.values), dtype=bool)
    pinned[list(pinned_indices(problem))] = True
    levels = []
    for cut in hull(CutSolver(problem)):
        level = pinned.copy()
        level[list(cut.saved)] = True
        levels.append(level)
    return Segments(simulator, levels, pinned)


def peak(segments: Segments, mask: np.ndarray) -> int:
    return int(segments.simulator.run(mask[:, None]).peak[0])


def test_cuts_of_a_chain_lie_all_along_it() -> None:
    """Every place of a chain has one live value, so a third of them are cuts, and each frontier is the layer before."""
    segments = segments_of(chain(30))
    assert len(segments.cuts) == 10
    assert max(b - a for a, b in pairwise(segments.cuts)) <= 5
    assert [np.flatnonzero(f).tolist() for f in segments.frontiers] == [[c] for c in segments.cuts.tolist()]


def test_a_narrow_place_is_found() -> None:
    """Two halves with skip connections: only behind layers 3 and 4 does one value pass alone."""
    problem = chain(9)
    values = list(problem.values)
    for k in (2, 3, 6, 7, 8):
        values[k] = replace(values[k], reads=(k - 2, k - 1))
    segments = segments_of(Problem(tuple(values), problem.steps))
    assert [c for c in segments.cuts if 2 <= c <= 5] == [3]
    assert np.flatnonzero(segments.frontiers[segments.cuts.tolist().index(3)]).tolist() == [3]


@pytest.mark.parametrize("seed", SEEDS)
def test_reach_falls_and_covers_what_steps_read(seed: int) -> None:
    problem = seeded_problem(seed, LARGE)
    segments = segments_of(problem)
    assert (np.diff(segments.reach) <= 0).all()
    for b, step in enumerate(problem.steps):
        assert all(problem.values[v].position <= segments.reach[b] for v in step.reads)
    for w, value in enumerate(problem.values):
        assert all(segments.until[v] >= value.position for v in value.reads), w


@pytest.mark.parametrize("seed", SEEDS)
def test_a_frontier_cuts_every_path(seed: int) -> None:
    """With all of a frontier saved, what is recomputed behind the cut needs nothing from before it but free values."""
    problem = seeded_problem(seed, LARGE)
    segments = segments_of(problem)
    for cut, frontier in zip(segments.cuts.tolist(), segments.frontiers, strict=True):
        assert all(
            problem.values[v].is_saveable and problem.values[v].position <= cut for v in np.flatnonzero(frontier)
        )
        for v, value in enumerate(problem.values):
            crosses = value.position <= cut and segments.until[v] > cut
            if crosses and value.is_saveable and not frontier[v]:
                assert value.kernel in ("pointwise", "constant")
                assert all(problem.values[r].position <= cut for r in value.reads)


@pytest.mark.parametrize("seed", SEEDS)
def test_options_predict_what_the_simulator_finds(seed: int) -> None:
    """A tiling with one level everywhere: charges and times add up to the plan's, and no segment exceeds its peak."""
    problem = seeded_problem(seed, LARGE)
    segments = segments_of(problem)
    last = len(segments.bounds) - 1
    for level, mask in enumerate(segments.levels):
        whole = segments.measured.get((0, last, level))
        if whole is None:
            continue
        batch = segments.simulator.run((mask | segments.pinned)[:, None])
        assert whole.charge_bytes == int(batch.saved_bytes[0])
        assert whole.time_ns == int(batch.time_ns[0])
        assert whole.local_peak_bytes <= int(batch.backward_peak[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_keeps_the_pins_and_saves_only_what_may_be_saved(seed: int) -> None:
    problem = seeded_problem(seed, LARGE)
    segments = segments_of(problem)
    high = peak(segments, segments.levels[0])
    for share in (1.0, 0.8, 0.6):
        mask = segments.plan(int(high * share))
        if mask is not None:
            assert (mask | ~segments.pinned).all()
            assert all(problem.values[v].is_saveable for v in np.flatnonzero(mask))


def test_plans_of_a_chain_fit_and_rise_in_time() -> None:
    """The programme alone, without local search, meets every budget of a chain down to a third of its peak."""
    segments = segments_of(chain(64))
    high = peak(segments, segments.levels[0])
    times = []
    for budget_bytes in range(high, high // 3, -3):
        mask = segments.plan(budget_bytes)
        assert mask is not None and peak(segments, mask) <= budget_bytes
        times.append(int(segments.simulator.run(mask[:, None]).time_ns[0]))
    assert times == sorted(times)


def test_no_plan_below_what_any_option_needs() -> None:
    assert segments_of(chain(12)).plan(0) is None
