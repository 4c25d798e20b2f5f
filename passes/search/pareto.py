"""Plans from the fastest plan to the plan of lowest peak: one search for all budgets instead of one for each.

An archive keeps every plan that no other plan tried so far beats in both peak and time, because the local search for one budget
often tries the best plan for another budget.  A budget gets a search of its own only if the archive's plan is far from the
lower bound.

With a link to the host, each budget gets the plan with copies that is found for it, too, down to the lowest peak that copies reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compile_remat.passes.problem.plan import Plan, Status
from compile_remat.passes.search.pareto_archive import ParetoArchive
from compile_remat.passes.search.solver import Planner
from compile_remat.passes.search.strategy import Search


@dataclass(frozen=True)
class Curves:
    """Plans from the fastest to the lowest, each faster than all plans of a lower peak.

    Attributes:
        best: Plans that may move tensors to the host, if the planner has a link.
        kept: Plans that move nothing.
    """

    best: list[Plan]
    kept: list[Plan]


def curves(planner: Planner, points: int) -> Curves:
    """The plans with and without copies to the host; both are the same if the planner has no link.

    Args:
        planner: See `_kept`.
        points: Number of budgets, evenly spaced from the lowest peak to the fastest plan's peak, of each of both.
    """
    kept = _kept(planner, points)
    moving = [] if planner.offload is None else list(_moving(planner, kept, points))
    return Curves(_best([*kept, *moving]), kept)


def _moving(planner: Planner, kept: Sequence[Plan], points: int) -> Iterator[Plan]:
    """The plans with copies for evenly spaced budgets that copies reach; those without where they are no slower."""
    assert planner.offload is not None
    fastest, lowest = kept[0], planner.lowest()
    yield lowest
    span = fastest.peak_bytes - lowest.peak_bytes
    for k in range(1, points - 1):
        budget_bytes = lowest.peak_bytes + span * k // max(1, points - 1)
        within = next((plan for plan in kept if plan.peak_bytes <= budget_bytes), None)
        without = within or replace(kept[-1], budget_bytes=budget_bytes, status=Status.OVER_BUDGET)
        found = planner.offload.fastest(budget_bytes, without)
        if found.is_feasible:
            yield found


def _kept(planner: Planner, points: int) -> list[Plan]:
    """Plans that move nothing, from the fastest to the lowest, each faster than all plans of a lower peak.

    A plan may be a little slower than that of `Planner.within` for the same budget, which searches for that budget alone.

    Args:
        planner: The planner, whose limits hold for each of the searches.
        points: Number of budgets, evenly spaced from the lowest peak to the fastest plan's peak.
    """
    archive = ParetoArchive()
    planner = planner.recording(archive)
    search = planner.search
    fastest, lowest = planner.fastest(), planner.lowest_kept()
    span = fastest.peak_bytes - lowest.peak_bytes
    budgets = [lowest.peak_bytes + span * k // max(1, points - 1) for k in range(points - 2, 0, -1)]
    anchors = [lowest.peak_bytes + int(share * span) for share in planner.options.frontier_anchors]
    low = []
    for budget_bytes in budgets:
        with planner.work.search():
            _look(search, archive, budget_bytes, anchors)
        if archive.within(budget_bytes) is None:
            low.append(budget_bytes)
    found = [(mask, b) for b in budgets if (mask := archive.within(b)) is not None]
    plans = [planner.plan_of(mask, budget_bytes, anchors=anchors) for mask, budget_bytes in found]
    return _best([fastest, *plans, *(planner.kept_within(b) for b in low), lowest])


def _look(search: Search, archive: ParetoArchive, budget_bytes: int, anchors: Sequence[int]) -> None:
    """Tries plans for one budget; the archive keeps the best."""
    if not _is_open(search, archive, budget_bytes, anchors):
        return
    options = search.options
    from_segments = search.from_segments(budget_bytes, options.frontier_segment_rounds)
    if from_segments is not None:
        archive.add(search.simulator.one(from_segments), from_segments[:, None])
        if not _is_open(search, archive, budget_bytes, anchors):
            return
    starts = [from_segments, archive.within(budget_bytes), archive.above(budget_bytes), search.best_level(budget_bytes)]
    start = min((m for m in starts if m is not None), key=lambda m: search.score(m, budget_bytes))
    improved = search.improve(start, budget_bytes, options.frontier_rounds)
    if search.peak(improved) > budget_bytes:
        search.improve(improved, budget_bytes, options.frontier_rounds, options.strict_factor)


def _is_open(search: Search, archive: ParetoArchive, budget_bytes: int, anchors: Sequence[int]) -> bool:
    known = archive.within(budget_bytes)
    return known is None or search.is_open(known, budget_bytes, anchors=anchors)


def _best(plans: Sequence[Plan]) -> list[Plan]:
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.extra_time_ns, p.peak_bytes)):
        if not kept or plan.peak_bytes < kept[-1].peak_bytes:
            kept.append(plan)
    return kept
