"""Restarts from near by: a few values of a plan are flipped at random, and the result is polished.

On small graphs one corner can hold the search although a much lower peak lies four flips away.  The work is bounded, so large
graphs get few kicks or none; the seed is fixed, so that the same problem gives the same plan.
"""

from __future__ import annotations

import numpy as np

from compile_remat.passes.memory.simulator import Bools
from compile_remat.passes.search.local_search import Polisher

FLIPS = 4
MOST = 16
WORK = 600
"""So many kicks at most, and so many kicks times values to choose from."""

AIM = 0.9
"""A kicked plan is polished towards this part of the peak."""


def lower(polisher: Polisher, mask: Bools, rounds: int, weight_factor: float) -> Bools:
    """The plan of lowest peak among the given one and what its kicks lead to."""
    choices = polisher.pool[~polisher.pinned[polisher.pool]]
    if len(choices) < FLIPS:
        return mask
    random = np.random.default_rng(0)
    best, peak = mask, _peak(polisher, mask)
    for _ in range(min(MOST, WORK // len(choices))):
        if polisher.simulator.effort.is_spent:
            break
        start = best.copy()
        start[random.choice(choices, size=FLIPS, replace=False)] ^= True
        found = polisher.run(start, int(AIM * peak), rounds, weight_factor)
        found_peak = _peak(polisher, found)
        if found_peak < peak:
            best, peak = found, found_peak
    return best


def _peak(polisher: Polisher, mask: Bools) -> int:
    return int(polisher.simulator.one(mask).peak[0])
