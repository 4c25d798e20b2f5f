"""The least time of all plans within a budget, whatever they move to the host.

A plan that moves D bytes takes, if nothing is moved, at most D bytes more than the budget at any moment, so that it recomputes at
least as long as any plan there.  Its copies slow the kernels beside them, and for the bytes beyond those that the link takes away
during the forward, kernels wait.  Both grow with D, so D is one more variable of the bounds' programmes, with a price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from compile_remat.passes.search.bounds.lp_bound import LpBound, at_the_begin
from compile_remat.passes.search.bounds.moment_bound import MomentBound
from compile_remat.passes.search.bounds.programme import Away
from compile_remat.passes.search.min_cut import Cut, lower_bound_ns
from compile_remat.passes.search.offload.link import Link
from compile_remat.passes.search.strategy import Search

NEVER_NS = 1 << 62
"""The least time of a budget that no plan keeps."""


@dataclass(frozen=True)
class MovingBound:
    """The bound for one budget.

    Attributes:
        window_bytes: The most bytes that leave during the forward.
        most_bytes: The most bytes that are worth moving.
    """

    search: Search
    link: Link
    window_bytes: int
    most_bytes: int

    def least_time_ns(self, budget_bytes: int, most_ns: int) -> int:
        """Least extra time of the plans within the budget that compute no value three times; at most `most_ns`."""
        search = self.search
        bound_ns = self.by_cuts_ns(budget_bytes)
        if most_ns - bound_ns > search.options.close_gap * search.problem.step_time_ns and not search.work.is_spent:
            bound_ns = max(bound_ns, self._by_programme(budget_bytes) - search.fastest_time_ns)
        return min(most_ns, bound_ns)

    def by_cuts_ns(self, budget_bytes: int) -> int:
        """The bound of cuts alone, of plans that compute values any number of times; `NEVER_NS` if no plan saves so little."""
        saved_bytes = budget_bytes - at_the_begin(self.search.simulator).fixed_bytes
        least_ns = self._by_cuts(saved_bytes)
        return NEVER_NS if least_ns is None else max(0, least_ns - self.search.fastest_time_ns)

    def _by_programme(self, budget_bytes: int) -> int:
        search = self.search
        if search.uses_moments:
            return (
                MomentBound(search.simulator, search.pinned, search.options, self._away)
                .proof(budget_bytes)
                .least_time_ns
            )
        points = LpBound(search.simulator, search.options, away=self._away)
        search.work.charge(points.programme.num_entries)
        return points.least_time_ns(budget_bytes)

    @property
    def _away(self) -> tuple[Away, Away]:
        """Bytes within the window and beyond it, with the least time of their copies."""
        within_bytes = min(self.window_bytes, self.most_bytes)
        beyond_bytes = self.most_bytes - within_bytes
        slowing_ns = self.link.slowed_part * (1e9 / self.link.out_bytes_per_s + 1e9 / self.link.back_bytes_per_s)
        waiting_ns = 1e9 / self.link.out_bytes_per_s
        return (
            Away(within_bytes, math.floor(slowing_ns * within_bytes)),
            Away(beyond_bytes, math.floor((slowing_ns + waiting_ns) * beyond_bytes)),
        )

    def _by_cuts(self, saved_bytes: int) -> int | None:
        """The bound of all cuts at prices around those of the link; None if no plan saves so little."""
        search, away = self.search, self._away
        cuts, most_cuts = search.cuts, search.options.bound_cuts
        before = cuts.num_cuts
        if lower_bound_ns(cuts, search.hull, saved_bytes + self.most_bytes, most_cuts) is None:
            return None
        lower_bound_ns(cuts, search.hull, saved_bytes + away[0].nbytes, most_cuts)
        for each in away:
            if each.nbytes:
                cuts.cut(each.cost_ns / each.nbytes)
        search.work.charge((cuts.num_cuts - before) * len(cuts.rows))
        return max(0, *(_proven_ns(cut, saved_bytes, away) for cut in cuts.known))


def _proven_ns(cut: Cut, saved_bytes: int, away: tuple[Away, ...]) -> int:
    """The bound that one cut proves: each byte that is saved beyond `saved_bytes` and not away costs the cut's price."""
    charge = cut.price * saved_bytes
    gains = sum(max(0.0, cut.price * each.nbytes - each.cost_ns) for each in away)
    slack = 1e-6 + 1e-12 * (cut.value + abs(charge) + gains)
    return math.ceil(cut.value - charge - gains - slack)
