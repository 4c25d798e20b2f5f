"""A chain of plans for ever smaller budgets; each plan is the start of the local search for the next budget.

If no place of a graph is narrow, segments between two cuts of the forward describe the graph badly, and a search that starts at
the budget itself ends in a poor local optimum.  The plan for a slightly larger budget is a better start, because little has to
change.  The budgets fall by a fixed factor from the fastest plan's peak, so that a plan does not depend on the budgets of earlier
searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from compile_remat.passes.memory.simulator import Bools
from compile_remat.passes.search.moves.local_search import LocalSearch


class Continuation:
    """The chain of one problem, computed from the largest budget as far down as the asked budget needs."""

    def __init__(self, searcher: LocalSearch, levels: Sequence[Bools], top_bytes: int) -> None:
        self.searcher = searcher
        self.levels = levels
        self.top = top_bytes, levels[0]

    def start(self, budget_bytes: int) -> Bools:
        """The plan of the chain's last budget above `budget_bytes`, or a level if the level scores better."""
        work, step = self.searcher.simulator.work, self.searcher.options.continuation_step
        target, plan = self.top
        while target * step > max(1, budget_bytes) and not work.is_spent:
            target, above = int(target * step), plan
            plan = work.shared((self, target), partial(self._at_target, target, above))
        return self._best(plan, budget_bytes)

    def _at_target(self, target_bytes: int, above: Bools) -> Bools:
        return self.searcher.run(
            self._best(above, target_bytes), target_bytes, self.searcher.options.continuation_rounds
        )

    def _best(self, plan: Bools, budget_bytes: int) -> Bools:
        candidates = [plan, *self.levels]
        batch = self.searcher.simulator.run(np.stack(candidates, axis=1))
        return candidates[int(np.argmin(self.searcher.score(batch, budget_bytes, self.searcher.weight)))]
