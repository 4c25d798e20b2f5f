"""The step of a plan along time has the simulator's peaks, and its movable buffers are those that the plan saves for itself."""

from __future__ import annotations

import numpy as np
import pytest

from compile_remat.passes import Planner
from tests.oracles.exact_plans import all_plans
from tests.oracles.random_problems import Shape, chain, seeded_problem


@pytest.mark.parametrize("seed", range(40))
def test_the_peaks_are_those_of_the_simulator(seed: int) -> None:
    problem = seeded_problem(seed, Shape(with_memory_of_kernels=seed % 2 == 0))
    planner = Planner(problem)
    for mask in all_plans(problem).masks.T[:16]:
        batch, curve = planner.simulator.one(mask), planner.curve(mask)
        assert curve.forward_live.max() == batch.forward_peak[0]
        assert curve.backward_live.max() == batch.backward_peak[0]
        recomputed_ns = int(planner.simulator.time_ns @ batch.recomputed[:, 0])
        steps_ns = sum(step.time_ns for step in problem.steps)
        assert curve.backward_starts_ns[-1] == recomputed_ns + steps_ns
        assert len(curve.places) + 1 == len(curve.forward_live) == len(curve.forward_starts_ns)
        assert len(curve.slots) == len(curve.backward_live) == len(curve.backward_starts_ns) - 1
        assert all(curve.slots)


@pytest.mark.parametrize("seed", range(40))
def test_movable_buffers_are_saved_live_throughout_and_read_behind_their_places(seed: int) -> None:
    problem = seeded_problem(seed, Shape(with_memory_of_kernels=True))
    planner = Planner(problem)
    for mask in all_plans(problem).masks.T[:16]:
        batch, curve = planner.simulator.one(mask), planner.curve(mask)
        for each in curve.movable:
            value = problem.values[each.value]
            assert batch.used[each.value, 0] and not value.is_output and value.name == each.name
            assert each.made <= each.last_read < len(problem.values)
            readers = [w for w, reader in enumerate(problem.values) if each.value in reader.reads and reader.in_forward]
            assert each.last_read >= max(readers, default=0)
            late = [
                w for w, reader in enumerate(problem.values) if each.value in reader.reads and not reader.in_forward
            ]
            if batch.used[late, 0].any():  # the forward computes it at its end
                assert each.last_read == len(problem.values) - 1
            assert curve.forward_live[each.made :].min() >= each.nbytes
            assert curve.backward_live[: each.first_read + 1].min() >= each.nbytes


def test_a_chain_by_hand() -> None:
    planner = Planner(chain(4, nbytes=3, time_ns=5))
    curve = planner.curve(np.ones(4, dtype=bool))
    assert curve.places == ("v0", "v1", "v2", "v3")
    assert curve.forward_live.tolist() == [3, 6, 9, 12, 12]
    assert curve.forward_starts_ns.tolist() == [0, 5, 10, 15, 20]
    assert [(each.name, each.made, each.last_read, each.first_read) for each in curve.movable] == [
        ("v0", 0, 1, 3), ("v1", 1, 2, 2), ("v2", 2, 3, 1), ("v3", 3, 3, 0),
    ]  # fmt: skip
