"""The bytes that a moment counts, beside those of the simulated plan at that step."""

from __future__ import annotations

import numpy as np
import pytest
import scipy

from compile_remat.passes import Problem, Step, Value
from compile_remat.passes.memory.simulator import Bools, Simulator
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE
from compile_remat.passes.search.bounds.lp_bound import at_the_begin
from compile_remat.passes.search.bounds.moments import Moments
from compile_remat.passes.search.bounds.programme import Programme
from tests.oracles.exact_plans import all_plans
from tests.oracles.random_problems import Shape, seeded_problem

SHAPES = (
    Shape(max_values=9, max_late=3, max_steps=9, with_memory_of_kernels=True),
    Shape(max_values=7, max_late=0, max_steps=12, extern_only=True),
)


def counted_bytes(simulator: Simulator, mask: Bools, b: int) -> int:
    """The least that the rows of the moment at step `b` count for a plan: the other variables are free to hide bytes."""
    programme = Programme(simulator)
    Moments(simulator).backward(programme, b)
    batch, n = simulator.one(mask), simulator.num_values
    box = programme.box
    box[:n] = (batch.used | batch.recomputed).astype(float)
    box[n : 2 * n] = batch.recomputed.astype(float)
    matrix = programme._matrix().toarray()
    right, is_point = np.array(programme._right), np.array(programme._is_point)
    found = scipy.optimize.linprog(matrix[is_point][0], matrix[~is_point], right[~is_point], bounds=box)
    assert found.status == 0, found.message
    return round(found.fun - right[is_point][0])


def live_bytes(simulator: Simulator, mask: Bools, b: int) -> int:
    batch = simulator.one(mask)
    return int(batch.live[0, batch.step_slots[0, b]])


def read_again_through_registers(*, held_bytes: int = 0) -> Problem:
    """`p` is computed of `a` in registers, before g0 and for g2 as well: `a` lives while g1 runs, which reads neither."""
    values = (Value("a", 8, EXTERN, (), 9), Value("p", 4, POINTWISE, (0,), 1, position=1))
    steps = (
        Step("g0", 4, POINTWISE, (1,), (), realised=True),
        Step("g1", 2, EXTERN, (), (0,), held_bytes=held_bytes),
        Step("g2", 4, POINTWISE, (1,), (1,), is_output=True),
        Step("output", 0, CONSTANT, (), (2,)),
    )
    return Problem(values, steps, 20)


def test_what_is_read_again_through_registers_is_alive_in_between() -> None:
    simulator, saving_a = Simulator(read_again_through_registers()), np.array([True, False])
    assert simulator.one(saving_a).recomputed[:, 0].tolist() == [False, True]
    assert live_bytes(simulator, saving_a, 1) == 8 + 4 + 2
    assert counted_bytes(simulator, saving_a, 1) == 8 + 4 + 2


@pytest.mark.parametrize("b", range(3))
def test_copies_of_inputs_are_alive_up_to_their_last_reader(b: int) -> None:
    without, held = (Simulator(read_again_through_registers(held_bytes=n)) for n in (0, 16))
    mask = np.array([True, False])
    expected = 16 if b <= 1 else 0
    assert live_bytes(held, mask, b) - live_bytes(without, mask, b) == expected
    assert counted_bytes(held, mask, b) - counted_bytes(without, mask, b) == expected
    assert at_the_begin(held).fixed_bytes - at_the_begin(without).fixed_bytes == 16


@pytest.mark.parametrize("shape", SHAPES, ids=["kernels", "extern"])
@pytest.mark.parametrize("seed", [*range(0, 60, 3), 94, 148])
def test_no_moment_counts_more_than_a_plan_has(seed: int, shape: Shape) -> None:
    """And where every kernel has a buffer of its own, no less either.

    In 94 and 148 a step writes over what it reads through registers.
    """
    problem = seeded_problem(seed, shape)
    simulator, masks = Simulator(problem), all_plans(problem).masks
    for p in range(0, masks.shape[1], max(1, masks.shape[1] // 4)):
        for b in range(simulator.num_steps):
            counted, live = counted_bytes(simulator, masks[:, p], b), live_bytes(simulator, masks[:, p], b)
            assert counted == live if shape.extern_only else counted <= live, (p, b)
