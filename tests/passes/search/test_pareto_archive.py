"""Plans remembered, against a scan of all that were tried."""

from __future__ import annotations

import numpy as np
import pytest

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.search.pareto_archive import ParetoArchive
from tests.oracles.random_problems import Shape, seeded_problem


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_within_any_budget(seed: int) -> None:
    simulator, random = Simulator(seeded_problem(seed, Shape(max_values=14, max_steps=9))), np.random.default_rng(seed)
    masks = (random.random((simulator.num_values, 60)) < 0.5) & simulator.is_saveable[:, None]
    whole, archive = simulator.run(masks), ParetoArchive()
    for first in range(0, 60, 20):
        columns = masks[:, first : first + 20]
        archive.add(simulator.run(columns), columns)
    for budget_bytes in [0, *whole.peak.tolist(), *(whole.peak - 1).tolist(), int(whole.peak.max()) + 1]:
        fits, over = whole.peak <= budget_bytes, whole.peak > budget_bytes
        within, above = archive.within(budget_bytes), archive.above(budget_bytes)
        assert (within is not None) == bool(fits.any())
        if within is not None:
            found = simulator.one(within)
            assert found.peak[0] <= budget_bytes
            assert found.time_ns[0] == whole.time_ns[fits].min()
        if above is not None:
            assert simulator.one(above).peak[0] > budget_bytes
        else:  # all above are slower than something below
            assert not over.any() or whole.time_ns[over].min() >= whole.time_ns[fits].min()


def test_nothing_is_kept_that_another_beats() -> None:
    simulator = Simulator(seeded_problem(3, Shape(max_values=14, max_steps=9)))
    masks = (np.random.default_rng(0).random((simulator.num_values, 200)) < 0.5) & simulator.is_saveable[:, None]
    archive = ParetoArchive()
    assert archive.within(1 << 40) is None
    assert archive.above(0) is None
    for _ in range(2):  # the second time brings nothing new
        archive.add(simulator.run(masks), masks)
        assert (np.diff(archive.peaks) > 0).all()
        assert (np.diff(archive.times) < 0).all()
