"""All plans of a small problem, and the best of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import (
    FREE,
    SAVE,
    Problem,
)


@dataclass(frozen=True)
class AllPlans:
    """Peak, saved bytes and time of every plan of a small problem."""

    masks: NDArray[np.bool_]
    peaks: NDArray[np.int64]
    times: NDArray[np.int64]
    saved_bytes: NDArray[np.int64]

    @property
    def lowest_peak(self) -> int:
        """The least peak of any plan."""
        return int(self.peaks.min())

    @property
    def budgets(self) -> range:
        """Every budget from the lowest peak of any plan to the one of the fastest."""
        return range(self.lowest_peak, int(self.peaks[self.times == self.times.min()].min()) + 1)

    def fastest_within(self, budget_bytes: int) -> int | None:
        """Time of the fastest plan whose peak fits; None where none does."""
        fits = self.peaks <= budget_bytes
        return int(self.times[fits].min()) if fits.any() else None


def free_choices(problem: Problem) -> list[int]:
    """Values that a plan may save or not."""
    return [v for v, value in enumerate(problem.values) if value.is_saveable and value.pin == FREE]


def all_plans(problem: Problem) -> AllPlans:
    """Simulate every saved set (pinned values included in each)."""
    free = free_choices(problem)
    n, count = len(problem.values), 1 << len(free)
    masks = np.zeros((n, count), dtype=bool)
    for k, v in enumerate(free):
        masks[v] = (np.arange(count) >> k) & 1
    for v, value in enumerate(problem.values):
        masks[v] |= value.pin == SAVE and value.is_saveable
    batch = Simulator(problem).run(masks)
    return AllPlans(masks, batch.peak, batch.time_ns, batch.saved_bytes)
