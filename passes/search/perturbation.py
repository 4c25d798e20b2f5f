"""Iterated local search for a lower peak: a few values of a plan are flipped at random, and local search improves the result.

Single flips and swaps can end in a plan whose peak is much higher than that of another plan four flips away.  The work is
bounded: a large graph gets few perturbations or none.  The seed is fixed, so that the same problem gives the same plan.
"""

from __future__ import annotations

import numpy as np

from compile_remat.passes.memory.simulator import Bools
from compile_remat.passes.search.local_search import LocalSearch


def lower(searcher: LocalSearch, mask: Bools, rounds: int, weight_factor: float) -> Bools:
    """The plan of lowest peak among the given one and what its perturbations lead to."""
    options = searcher.options
    choices = searcher.pool[~searcher.pinned[searcher.pool]]
    if len(choices) < options.perturbation_flips:
        return mask
    random = np.random.default_rng(0)
    best, peak = mask, _peak(searcher, mask)
    for _ in range(min(options.max_perturbations, options.perturbation_work // len(choices))):
        if searcher.simulator.work.is_spent:
            break
        start = best.copy()
        start[random.choice(choices, size=options.perturbation_flips, replace=False)] ^= True
        found = searcher.run(start, int(options.perturbation_target * peak), rounds, weight_factor)
        found_peak = _peak(searcher, found)
        if found_peak < peak:
            best, peak = found, found_peak
    return best


def _peak(searcher: LocalSearch, mask: Bools) -> int:
    return int(searcher.simulator.one(mask).peak[0])
