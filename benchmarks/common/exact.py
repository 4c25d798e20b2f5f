"""The exact optimum of a problem with few free choices, by simulating every plan; torch-free.

A real graph has hundreds of values that may be saved, so the graph is cut down first: the largest values that are worth saving
stay free, the choice for all others is fixed.  Planner and search then have the same freedom on the same graph.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes import Problem
from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import FREE, RECOMPUTE, SAVE
from compile_remat.passes.search.min_cut import CutSolver, hull

BATCH = 1024
"""Plans simulated at a time."""


@dataclass(frozen=True)
class Front:
    """Peak in bytes and time in ns of the plans that no other plan beats, lowest peak first."""

    peaks: NDArray[np.int64]
    times: NDArray[np.int64]

    def fastest_ns(self, budget_bytes: int) -> int | None:
        """Time of the fastest plan within the budget; None where there is none."""
        fits = int(np.searchsorted(self.peaks, budget_bytes, side="right"))
        return int(self.times[fits - 1]) if fits else None


def free_choices(problem: Problem) -> list[int]:
    """Values that a plan may save or not."""
    return [v for v, value in enumerate(problem.values) if value.is_saveable and value.pin == FREE]


def cut_down(problem: Problem, num_free: int) -> Problem:
    """The same graph with at most `num_free` free choices: the largest of those that are worth saving at some price.

    Every plan saves the other values that are worth saving, and recomputes the values that never are (by the cut's hull).
    """
    worth = {v for cut in hull(CutSolver(problem)) for v in cut.saved}
    choices = free_choices(problem)
    ranked = sorted((v for v in choices if v in worth), key=lambda v: (-problem.values[v].nbytes, v))
    pins = dict.fromkeys(choices, RECOMPUTE) | dict.fromkeys(ranked, SAVE) | dict.fromkeys(ranked[:num_free], FREE)
    values = tuple(replace(x, pin=pins.get(v, x.pin)) for v, x in enumerate(problem.values))
    return replace(problem, values=values)


def exact_front(problem: Problem) -> Front:
    """Simulate all 2^k plans of k free choices; ValueError above 20 of them."""
    free = np.array(free_choices(problem), dtype=np.int64)
    if len(free) > 20:
        raise ValueError(f"{len(free)} free choices are 2^{len(free)} plans: cut the problem down first")
    simulator = Simulator(problem)
    fixed = np.array([x.pin == SAVE and x.is_saveable for x in problem.values], dtype=bool)
    peaks, times = [], []
    for first in range(0, 1 << len(free), BATCH):
        numbers = np.arange(first, min(first + BATCH, 1 << len(free)))
        masks = np.repeat(fixed[:, None], len(numbers), axis=1)
        masks[free] = (numbers >> np.arange(len(free))[:, None]) & 1
        batch = simulator.run(masks)
        peaks.append(batch.peak)
        times.append(batch.time_ns)
    return _pareto(np.concatenate(peaks), np.concatenate(times))


def _pareto(peaks: NDArray[np.int64], times: NDArray[np.int64]) -> Front:
    order = np.lexsort((times, peaks))
    best = np.minimum.accumulate(times[order])
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = best[1:] < best[:-1]
    return Front(peaks[order][keep], times[order][keep])
