"""Last moves: no flip of one or two operands of a kernel is missed, and no plan computes a result that it could have kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from compile_remat.passes.memory.simulator import Bools, Simulator
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION, Problem, Step, Value
from compile_remat.passes.search.min_cut import pinned_indices
from compile_remat.passes.search.moves.operands import OperandMoves, kernel_operands, spared
from compile_remat.passes.search.options import DEFAULT
from compile_remat.passes.search.solver import Planner
from tests.oracles.exact_plans import all_plans
from tests.oracles.random_problems import Shape, chain, seeded_problem
from tests.oracles.slow_operands import slow_operands

LARGE = Shape(max_values=16, max_late=4, max_steps=14)
SMALL = Shape(max_values=9, max_late=3, max_steps=7)
WITHOUT_END = replace(DEFAULT, operand_rounds=50)
ALL = 10**6


def pinned_of(problem: Problem) -> Bools:
    pinned = np.zeros(len(problem.values), dtype=bool)
    pinned[list(pinned_indices(problem))] = True
    return pinned


def some_mask(problem: Problem, seed: int) -> Bools:
    saveable = np.array([v.is_saveable for v in problem.values])
    return (np.random.default_rng(seed).random(len(saveable)) < 0.5) & saveable | pinned_of(problem)


@pytest.mark.parametrize("seed", range(60))
def test_operands_are_those_of_a_walk_node_by_node(seed: int) -> None:
    simulator = Simulator(seeded_problem(seed, LARGE))
    assert set(map(frozenset, kernel_operands(simulator))) == slow_operands(simulator)


@pytest.mark.parametrize("seed", range(60))
def test_no_flip_of_one_or_two_operands_makes_the_plan_faster(seed: int) -> None:
    problem = seeded_problem(seed, LARGE)
    simulator, pinned, mask = Simulator(problem), pinned_of(problem), some_mask(problem, seed)
    before = simulator.one(mask)
    limit_bytes = int(before.peak[0])
    found = OperandMoves(simulator, pinned, WITHOUT_END).faster(mask, limit_bytes, ALL)
    best = simulator.one(found)
    assert best.peak[0] <= limit_bytes and best.time_ns[0] <= before.time_ns[0]
    assert (found | ~pinned).all() and (found <= (simulator.is_saveable | mask)).all()
    free = simulator.is_saveable & ~pinned & (best.used | best.recomputed)[:, 0]
    moves = {(v,) for v in np.flatnonzero(free).tolist()}
    for operands in slow_operands(simulator):
        moves |= set(combinations(sorted(v for v in operands if free[v]), 2))
    for move in sorted(moves):
        other = found.copy()
        other[list(move)] ^= True
        after = simulator.one(other)
        assert after.peak[0] > limit_bytes or after.time_ns[0] >= best.time_ns[0], move


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_is_no_faster_than_the_fastest_of_all(seed: int) -> None:
    problem = seeded_problem(seed, SMALL)
    simulator, mask, plans = Simulator(problem), some_mask(problem, seed), all_plans(problem)
    limit_bytes = int(simulator.one(mask).peak[0])
    found = simulator.one(OperandMoves(simulator, pinned_of(problem), WITHOUT_END).faster(mask, limit_bytes, ALL))
    optimum = plans.fastest_within(limit_bytes)
    assert optimum is not None and found.time_ns[0] >= optimum


@pytest.mark.parametrize("seed", range(60))
def test_no_more_plans_are_simulated_than_asked(seed: int) -> None:
    problem = seeded_problem(seed, LARGE)
    simulator, mask = Simulator(problem), some_mask(problem, seed)
    moves = OperandMoves(simulator, pinned_of(problem), replace(WITHOUT_END, operand_rounds=1))
    moves.faster(mask, int(simulator.one(mask).peak[0]), 2)
    assert moves.simulations <= 2


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("rise_ns", [0.0, 2.0])
def test_sparing_operations_takes_no_memory_and_no_time(seed: int, rise_ns: float) -> None:
    problem = seeded_problem(seed, LARGE)
    simulator, pinned, mask = Simulator(problem), pinned_of(problem), some_mask(problem, seed)
    before = simulator.one(mask)
    limit_bytes = int(before.peak[0])
    after = simulator.one(spared(simulator, pinned, mask, limit_bytes, rise_ns))
    assert after.peak[0] <= limit_bytes
    assert after.time_ns[0] <= before.time_ns[0] + rise_ns
    assert after.saved_bytes[0] <= before.saved_bytes[0]
    assert (after.recomputed <= before.recomputed).all()
    assert (after.used[pinned] == (after.used | after.recomputed)[pinned]).all()


def loss_of_logits() -> Problem:
    """Sums over rows of logits: saving a sum or its logarithm takes the same bytes, and the backward reads the logarithm alone."""
    values = (
        Value("logits", 4096, EXTERN, (), 900, position=0),
        Value("sum", 64, REDUCTION, (0,), 500, position=1),
        Value("log", 64, POINTWISE, (1,), 1, save_time_ns=2, position=2),
        Value("count", 16, REDUCTION, (), 50, position=3),
        Value("scale", 16, POINTWISE, (3,), 1, save_time_ns=2, position=4),
        Value("loss", 16, POINTWISE, (0, 2, 4), 5, save_time_ns=9, is_output=True, position=5),
    )
    steps = (
        Step("gradient", 4096, POINTWISE, (0, 2, 4), (), 300, realised=True),
        Step("weight", 4096, EXTERN, (), (0,), 900, is_output=True),
        Step("output", 0, POINTWISE, (), (1,)),
    )
    return Problem(values, steps, step_time_ns=1_000_000)


def test_a_result_is_saved_in_place_of_its_operand() -> None:
    problem = loss_of_logits()
    simulator, pinned = Simulator(problem), pinned_of(problem)
    mask = np.array([v.name in ("logits", "sum", "count") for v in problem.values])
    limit_bytes = int(simulator.one(mask).peak[0])
    found = simulator.one(spared(simulator, pinned, mask, limit_bytes, rise_ns=10.0))
    saved = [problem.values[v].name for v in np.flatnonzero(found.used[:, 0])]
    assert saved == ["logits", "log", "scale"] and not found.recomputed.any()
    assert (spared(simulator, pinned, mask, limit_bytes, rise_ns=1.0) == mask).all()
    one_alone = simulator.one(spared(simulator, pinned, mask, limit_bytes, rise_ns=3.0))
    assert one_alone.time_ns[0] <= simulator.one(mask).time_ns[0] + 3.0


@pytest.mark.parametrize("seed", range(25))
def test_no_operand_makes_the_lowest_plan_faster(seed: int) -> None:
    """The search for the lowest peak ends with the time of its plan."""
    planner = Planner(seeded_problem(seed, LARGE))
    plan = planner.lowest(once=True)
    simulator, found = planner.simulator, planner.mask_of(plan.saved)
    best = simulator.one(found)
    for v in np.flatnonzero((best.used | best.recomputed)[:, 0] & simulator.is_saveable & ~planner.pinned):
        other = found.copy()
        other[v] ^= True
        after = simulator.one(other)
        assert after.peak[0] > plan.peak_bytes or after.time_ns[0] >= best.time_ns[0]


def test_a_problem_without_choices_stays_as_it_is() -> None:
    problem = chain(1)
    simulator, mask = Simulator(problem), np.zeros(1, dtype=bool)
    assert not spared(simulator, mask, mask, 10, 1.0).any()
