"""Problems in which buffers wait on the host: the same plan takes less by exactly the buffers that are away."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from compile_remat.passes import Link, Planner
from compile_remat.passes.search.offload.absent import without_moved
from compile_remat.passes.search.offload.transfers import transfers_of
from tests.oracles.random_problems import Shape, chain, seeded_problem
from tests.oracles.scaled import BYTES, scaled


@pytest.mark.parametrize("seed", range(40))
def test_live_bytes_of_a_plan_fall_by_the_buffers_that_are_away(seed: int) -> None:
    problem = scaled(seeded_problem(seed, Shape(max_late=0)))
    planner = Planner(problem)
    saved = planner.mask_of(planner.fastest().saved)
    curve = planner.curve(saved)
    made = transfers_of(curve, curve.movable, Link(10**9, 10**9, 1 << 50), sys.maxsize)
    less = Planner(without_moved(problem, curve, made)).curve(saved)
    steps = [slot for slot, name in enumerate(curve.slots) if name in {step.name for step in problem.steps}]
    for slot in steps:
        away = [buffer.nbytes for buffer, fetch in zip(made.moved, made.fetches, strict=True) if slot < fetch]
        assert curve.backward_live[slot] - less.backward_live[slot] == sum(away)
    assert np.array_equal(curve.backward_starts_ns, less.backward_starts_ns)


def test_no_move_is_dropped_for_bytes_that_are_away() -> None:
    """Of a chain that saves all, each buffer comes back when the one before it is free: saved bytes are no part of the peak."""
    problem = scaled(chain(24))
    planner = Planner(problem)
    saved = planner.mask_of(planner.fastest().saved)
    curve = planner.curve(saved)
    made = transfers_of(curve, curve.movable, Link(10**15, 10**15, 1 << 50), 0)
    simulator = Planner(without_moved(problem, curve, made)).simulator
    peak_bytes = int(simulator.one(saved).peak[0])
    assert peak_bytes < made.nbytes
    assert simulator.at_least(saved[:, None])[1] <= peak_bytes


@pytest.mark.parametrize("rate", [0.25, 0.5, 1.0])
def test_a_long_chain_recomputes_little_more_than_the_bytes_that_neither_budget_nor_link_takes(rate: float) -> None:
    """A layer's buffer is a MiB, and each layer takes as long; of the last layers there is no time to take any away."""
    length, kept = 48, 20
    problem = scaled(chain(length))
    per_layer_ns = problem.step_time_ns // (2 * length)
    bytes_per_s = int(rate * BYTES * 10**9 / per_layer_ns)
    plan = Planner(problem, link=Link(bytes_per_s, bytes_per_s, 1 << 50)).within(kept * BYTES)
    least = max(0, length - kept - rate * length) * per_layer_ns
    assert plan.is_feasible and plan.bound_time_ns <= plan.extra_time_ns
    assert least - per_layer_ns <= plan.extra_time_ns <= least + 0.04 * problem.step_time_ns
