"""Iterated local search for a lower peak: a few values of a plan are flipped at random, and local search improves the result.

Single flips and swaps can end in a plan whose peak is much higher than that of another plan four flips away.  The work is
bounded: a large graph gets few perturbations or none.  The seed is fixed, so that the same problem gives the same plan.
"""

from __future__ import annotations

import numpy as np

from compile_remat.passes.memory.simulator import Bools
from compile_remat.passes.search.moves.local_search import LocalSearch


def lower(searcher: LocalSearch, mask: Bools, rounds: int, weight_factor: float) -> Bools:
    """The plan of lowest peak among the given plan and the results of its perturbations; stops after too many without a gain."""
    options = searcher.options
    choices = searcher.pool[~searcher.pinned[searcher.pool]]
    if len(choices) < options.perturbation_flips:
        return mask
    random = np.random.default_rng(0)
    best, peak, found_at = mask, _peak(searcher, mask), 0
    for turn in range(min(options.max_floor_perturbations, options.perturbation_work // len(choices))):
        if searcher.simulator.work.is_spent or turn - found_at >= options.perturbation_patience:
            break
        start = best.copy()
        start[random.choice(choices, size=options.perturbation_flips, replace=False)] ^= True
        found = searcher.run(start, int(options.perturbation_target * peak), rounds, weight_factor)
        found_peak = _peak(searcher, found)
        if found_peak < peak:
            best, peak, found_at = found, found_peak, turn + 1
    return best


def faster(searcher: LocalSearch, mask: Bools, budget_bytes: int) -> Bools:
    """The fastest plan within the budget among the given plan, which fits, and the results of its perturbations.

    Perturbations of three kinds take turns: a few values anywhere, more in one place, many anywhere.  The search stops after
    `SearchOptions.perturbation_patience` perturbations in a row without a faster plan.
    """
    options = searcher.options
    choices = searcher.pool[~searcher.pinned[searcher.pool]]
    few, width = options.perturbation_flips, options.perturbation_width
    if len(choices) < 2 * few:
        return mask
    random = np.random.default_rng(0)
    best, found_at = mask, 0
    for turn in range(min(options.max_perturbations, options.faster_work // len(choices))):
        if searcher.simulator.work.is_spent or turn - found_at >= options.perturbation_patience:
            break
        kind, place = turn % 3, int(random.integers(len(choices)))
        among = choices[max(0, place - width) : place + width] if kind == 1 else choices
        size = min(len(among), (few, few + few // 2, 2 * few)[kind])
        start = best.copy()
        start[random.choice(among, size=size, replace=False)] ^= True
        found = searcher.run(start, budget_bytes, options.rounds, options.strict_factor if kind else 1.0)
        batch, known = searcher.simulator.one(found), searcher.simulator.one(best)
        if batch.peak[0] <= budget_bytes and batch.time_ns[0] < known.time_ns[0]:
            best, found_at = found, turn + 1
    return best


def _peak(searcher: LocalSearch, mask: Bools) -> int:
    return int(searcher.simulator.one(mask).peak[0])
