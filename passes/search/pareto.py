"""Plans from the fastest plan to the plan of lowest peak: one search for all budgets instead of one for each.

An archive keeps every plan that no other plan tried so far beats in both peak and time, because the local search for one budget
often tries the best plan for another budget.  A budget gets a search of its own only if the archive's plan is far from the
lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from compile_remat.passes.problem.plan import Plan
from compile_remat.passes.search.pareto_archive import ParetoArchive
from compile_remat.passes.search.solver import Planner
from compile_remat.passes.search.strategy import Search


def frontier(planner: Planner, points: int) -> list[Plan]:
    """Plans from the fastest to the lowest, each faster than all plans of a lower peak.

    A plan may be a little slower than that of `Planner.within` for the same budget, which searches for that budget alone.

    Args:
        planner: The planner, whose limits hold for each of the searches.
        points: Number of budgets, evenly spaced from the lowest peak to the fastest plan's peak.
    """
    archive = ParetoArchive()
    planner = planner.recording(archive)
    search = planner.search
    fastest, lowest = planner.fastest(), planner.lowest()
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
    return _best([fastest, *plans, *(planner.within(b) for b in low), lowest])


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
