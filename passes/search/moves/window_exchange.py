"""Window exchange, a large-neighbourhood move: a window of one plan is replaced by the same window of another plan.

Flips and swaps change one or two values, so they cannot reach a plan that saves and recomputes other values in a long window.
The levels of the min-cut are such plans, one for each price of a byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compile_remat.passes.memory.simulator import Bools
from compile_remat.passes.search.moves.local_search import LocalSearch


def cross(
    searcher: LocalSearch, mask: Bools, others: Sequence[Bools], budget_bytes: int, weight_factor: float
) -> Bools:
    """Replaces windows by those of the other plans and improves the result by local search, as long as the score falls."""
    options, weight = searcher.options, searcher.weight * weight_factor
    current, best = mask, _score(searcher, mask, budget_bytes, weight)
    for _ in range(options.window_rounds):
        if searcher.simulator.work.is_spent:
            break
        columns = _crossings(searcher, current, others)
        if not columns.shape[1]:
            break
        start = columns[:, lowest_scoring(searcher, columns, budget_bytes, weight)]
        found = searcher.run(start, budget_bytes, options.window_search_rounds, weight_factor)
        score = _score(searcher, found, budget_bytes, weight)
        if score >= best - options.min_gain_ns:
            break
        current, best = found, score
    return current


def _crossings(searcher: LocalSearch, current: Bools, others: Sequence[Bools]) -> Bools:
    pool = searcher.pool
    columns = []
    for length in searcher.options.window_lengths:
        for first in range(0, max(1, len(pool) - length // 2), max(1, length // 2)):
            window = pool[first : first + length]
            seen = {current[window].tobytes()}
            for other in others:
                key = other[window].tobytes()
                if key not in seen:
                    seen.add(key)
                    column = current.copy()
                    column[window] = other[window]
                    columns.append(column)
    return np.stack(columns, axis=1) if columns else np.zeros((len(current), 0), dtype=bool)


def _score(searcher: LocalSearch, mask: Bools, budget_bytes: int, weight: float) -> float:
    searcher.simulations += 1
    return float(searcher.score(searcher.simulator.one(mask), budget_bytes, weight)[0])


def lowest_scoring(searcher: LocalSearch, columns: Bools, budget_bytes: int, weight: float) -> int:
    """Column of the plan with the lowest score, the first of several.

    A score is at least the plan's time.  So plans are simulated in order of their times, until no remaining plan can score lower.
    """
    times, lengths = searcher.simulator.outlines(columns)
    order, length = np.argsort(times, kind="stable"), int(lengths.max())
    most, lowest = searcher.options.window_batch, (np.inf, -1)
    for first in range(0, len(order), most):
        if times[order[first]] > lowest[0]:
            break
        chosen = order[first : first + most]
        searcher.simulations += len(chosen)
        scores = searcher.score(searcher.simulator.run(columns[:, chosen]), budget_bytes, weight, length)
        best = np.lexsort((chosen, scores))[0]
        lowest = min(lowest, (float(scores[best]), int(chosen[best])))
    return lowest[1]
