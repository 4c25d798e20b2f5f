"""The search for a plan within a budget among those that compute no value twice in the backward.

The starts are the saved sets of min-cuts (levels) and of the dynamic programme over segments.  Local search improves the starts,
and a lower bound tells when to stop.  All loops run in index order and count plans, not seconds, so that the same problem gives
the same plan in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from compile_remat.passes.memory.simulator import Bools, Simulator
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.problem.work_budget import WorkBudget
from compile_remat.passes.search.bounds.floor import least_peak_bytes
from compile_remat.passes.search.bounds.lp_bound import LpBound, at_the_begin
from compile_remat.passes.search.bounds.moment_bound import MomentBound, Proof
from compile_remat.passes.search.min_cut import Cut, CutSolver, hull, lower_bound_ns, pinned_indices
from compile_remat.passes.search.moves import perturbation
from compile_remat.passes.search.moves.local_search import LocalSearch, search_pool
from compile_remat.passes.search.moves.operands import OperandMoves, spared
from compile_remat.passes.search.moves.window_exchange import cross
from compile_remat.passes.search.options import DEFAULT, SearchOptions
from compile_remat.passes.search.pareto_archive import ParetoArchive
from compile_remat.passes.search.segments import Segments


class Search:
    """Searches saved sets of one problem, as masks over its values; results that several budgets share are computed once.

    Args:
        work: Counts the work, and says when to stop.
        options: Options of the search.
        archive: Keeps the best of all plans tried; None to keep none.

    Attributes:
        hull: The cuts on the lower convex hull of time against saved bytes, fastest first.
        levels: Masks of some of these cuts, each [values].
        pinned: Mask of the values that must be saved, [values].
        fastest_time_ns: Time of recomputing and saving in the fastest plan of any size.
    """

    def __init__(
        self, problem: Problem, work: WorkBudget, options: SearchOptions = DEFAULT, archive: ParetoArchive | None = None
    ) -> None:
        self.problem, self.work, self.options, self.archive = problem, work, options, archive
        self.simulator = Simulator(problem, work)
        self.cuts = CutSolver(problem)
        self.hull: list[Cut] = hull(self.cuts, options.hull_cuts)
        self.pinned = self.mask(pinned_indices(problem))
        self.levels = [self.mask(c.saved) | self.pinned for c in _spread(self.hull, options.max_levels)]
        self.fastest_time_ns = min(c.time_ns for c in self.hull)
        self._in_segments = 0
        self._made_searcher: LocalSearch | None = None

    @property
    def simulations(self) -> int:
        """Number of plans tried so far."""
        in_local_search = self._made_searcher.simulations if self._made_searcher is not None else 0
        return self._in_segments + in_local_search + self.operands.simulations

    # -- what is known of a plan --------------------------------------------------------------------------------------

    def mask(self, indices: Iterable[int]) -> Bools:
        """Mask of the values at these indices, [values]."""
        mask = np.zeros(len(self.problem.values), dtype=bool)
        mask[list(indices)] = True
        return mask

    def peak(self, mask: Bools) -> int:
        """Peak of the plan, bytes."""
        return int(self.simulator.one(mask).peak[0])

    def time(self, mask: Bools) -> int:
        """Time of recomputing and saving in the plan, ns."""
        return int(self.simulator.one(mask).time_ns[0])

    def score(self, mask: Bools, budget_bytes: int) -> float:
        """Score of the plan in `LocalSearch.score`; smaller is better."""
        batch = self.simulator.one(mask)
        return float(self.searcher.score(batch, budget_bytes, self.searcher.weight)[0])

    def bound(self, budget_bytes: int, otherwise_ns: int, *, once: bool = True, anchors: Sequence[int] = ()) -> int:
        """Least extra time of the plans within the budget; with `once`, of those that recompute each value at most once.

        The cut's bound enforces the budget at the begin of the backward.  If this bound is not close to the plan's own time,
        other points are used as well, and in small problems, moments.

        Args:
            otherwise_ns: The plan's own extra time, which is returned if the cut shows that no plan is within the budget.
            anchors: See `LpBound.least_time_ns`.
        """
        fixed_bytes = at_the_begin(self.simulator).fixed_bytes
        before = self.cuts.num_cuts
        least_ns = lower_bound_ns(self.cuts, self.hull, budget_bytes - fixed_bytes, self.options.bound_cuts)
        self.work.charge((self.cuts.num_cuts - before) * len(self.cuts.rows))
        if least_ns is None:
            return otherwise_ns
        bound = max(0, least_ns - self.fastest_time_ns)
        is_close = otherwise_ns - bound <= self.close_gap * self.problem.step_time_ns
        if once and self.uses_moments and not anchors:
            is_enough = is_close or self.work.is_spent
            found = self.moments.known(budget_bytes) if is_enough else self._proof(budget_bytes, otherwise_ns)
            return bound if found is None else max(bound, found.least_time_ns - self.fastest_time_ns)
        if is_close:
            return bound
        points = self.lp_points if once else self.lp_points_of_all
        self.work.charge(points.programme.num_entries)
        return max(bound, points.least_time_ns(budget_bytes, anchors) - self.fastest_time_ns)

    def _proof(self, budget_bytes: int, extra_ns: int) -> Proof:
        """The proof by moments beside a plan of this extra time: by two, or by more if these leave a gap beyond `moments_gap`."""
        enough_ns = self.fastest_time_ns + extra_ns - self.options.moments_gap * self.problem.step_time_ns
        return self.moments.proof(budget_bytes, enough_ns)

    def is_open(self, mask: Bools, budget_bytes: int, gap: float | None = None, anchors: Sequence[int] = ()) -> bool:
        """Returns whether a plan within the budget may be faster by more than `gap`, and work is left to find such a plan.

        Args:
            gap: Gap that is good enough, as a fraction of the step; None for `close_gap`.
        """
        if self.work.is_spent:
            return False
        gap = self.close_gap if gap is None else gap
        extra = self.time(mask) - self.fastest_time_ns
        return extra - self.bound(budget_bytes, extra, anchors=anchors) > gap * self.problem.step_time_ns

    def is_lowest(self, peak_bytes: int) -> bool:
        """Returns whether no plan's peak is much below this one."""
        return peak_bytes * self.options.close_peak <= self.least_peak_bytes

    def faster(self, mask: Bools, other: Bools, budget_bytes: int) -> Bools:
        """Returns `other` if it fits the budget and is faster than `mask`, else `mask`."""
        return other if self.peak(other) <= budget_bytes and self.time(other) < self.time(mask) else mask

    # -- plans for a budget -------------------------------------------------------------------------------------------

    def candidates(self, budget_bytes: int) -> list[Bools]:
        """Improved plans, then their starts: one round from the best level and the segments, all rounds from the better one."""
        starts = [self.best_level(budget_bytes)]
        from_segments = self.from_segments(budget_bytes)
        if from_segments is not None:
            starts.append(from_segments)
        found = [self.improve(start, budget_bytes, rounds=1) for start in starts]
        found.sort(key=lambda m: self.score(m, budget_bytes))
        best = self.finish(found[0], budget_bytes)
        return [best, *found, *starts]

    def improved(self, mask: Bools, budget_bytes: int) -> Bools:
        """Returns `mask`, which fits, or a faster plan that fits too, sought while the bound leaves a gap.

        If the bound's programme suggests starts (`uses_moments`), plans for other budgets are starts only for a wide gap.
        """
        options = self.options
        gap = options.wide_gap if self.uses_moments else None
        if self.uses_moments and self.is_open(mask, budget_bytes):
            mask = self.faster(mask, self.from_proof(mask, budget_bytes), budget_bytes)
        if self.is_open(mask, budget_bytes):
            for weight_factor in (1.0, options.strict_factor):
                crossed = cross(self.searcher, mask, self.levels, budget_bytes, weight_factor)
                mask = self.faster(mask, crossed, budget_bytes)
        if self.is_open(mask, budget_bytes, gap):
            lower = self.candidates(int(budget_bytes * options.lower_target))[0]
            mask = self.faster(mask, lower, budget_bytes)
        return self.shaken(mask, budget_bytes)

    def shaken(self, mask: Bools, budget_bytes: int) -> Bools:
        """Returns `mask`, which fits, or a faster plan from its random neighbours, sought only for a wide gap."""
        if self.options.uses_perturbation and self.is_open(mask, budget_bytes, self.options.wide_gap):
            return perturbation.faster(self.searcher, mask, budget_bytes)
        return mask

    def settled(self, mask: Bools, limit_bytes: int, units: float | None = None) -> Bools:
        """Returns `mask`, whose peak is at most `limit_bytes`, after the last moves of a search, see `moves.operands`.

        Args:
            units: Work that these moves may take; None for a part of what the search has taken so far.
        """
        units = self.options.operand_share * self.work.spent_units if units is None else units
        most = int(units) // (self.simulator.num_values + self.simulator.num_steps)
        if most and not self.work.is_spent:
            mask = self.operands.faster(mask, limit_bytes, most)
        return self.spared(mask, limit_bytes)

    def spared(self, mask: Bools, limit_bytes: int) -> Bools:
        """Returns `mask`, whose peak is at most `limit_bytes`, with fewer recomputed operations, see `moves.operands.spared`."""
        return spared(self.simulator, self.pinned, mask, limit_bytes, self.spared_rise_ns)

    @property
    def spared_rise_ns(self) -> float:
        """The time by which a plan may be slower if its backward is spared operations."""
        return self.options.spared_share * self.problem.step_time_ns if self.close_gap else 0.0

    def from_below(self, mask: Bools, budget_bytes: int) -> Bools:
        """Returns `mask`, which fits, or a faster plan from plans for lower budgets; the search for this budget found none."""
        starts = [mask]
        for share in self.options.lower_targets:
            if self.work.is_spent:
                break
            fitting = [m for m in self.candidates(int(budget_bytes * share)) if self.peak(m) <= budget_bytes]
            if fitting:
                starts.append(min(fitting, key=self.time))
                break
        best = min(starts, key=self.time)
        for start in starts:
            best = self.faster(best, self.finish(start, budget_bytes), budget_bytes)
        return self.shaken(best, budget_bytes)

    def from_proof(self, mask: Bools, budget_bytes: int) -> Bools:
        """The best plan from the starts that the bound's programme suggests; `mask` if there are none."""
        starts = self._proof(budget_bytes, self.time(mask) - self.fastest_time_ns).starts
        if not starts:
            return mask
        batch = self.simulator.run(np.stack(starts, axis=1))
        order = np.argsort(self.searcher.score(batch, budget_bytes, self.searcher.weight), kind="stable")
        found = list[Bools]()
        for k in order[: self.options.rounding_starts].tolist():
            found.append(self.finish(starts[k], budget_bytes))
            if self.peak(found[-1]) <= budget_bytes and not self.is_open(found[-1], budget_bytes):
                break
        return min(found, key=lambda m: self.score(m, budget_bytes))

    def finish(self, start: Bools, budget_bytes: int) -> Bools:
        """The plan after all rounds of local search; if it does not fit, after as many again with more weight on the budget."""
        best = self.improve(start, budget_bytes, self.options.rounds)
        if self.peak(best) > budget_bytes:
            best = self.improve(best, budget_bytes, self.options.rounds, self.options.strict_factor)
        return best

    def improve(self, mask: Bools, budget_bytes: int, rounds: int, weight_factor: float = 1.0) -> Bools:
        """The plan after local search, see `LocalSearch.run`."""
        return self.searcher.run(mask, budget_bytes, rounds, weight_factor)

    def from_segments(self, budget_bytes: int, rounds: int | None = None) -> Bools | None:
        """The plan of the segments' dynamic programme; None if there is none, or if no work is left to look for it."""
        rounds = self.options.segment_rounds if rounds is None else rounds
        return None if self.work.is_spent else self.segments.plan(budget_bytes, rounds)

    def best_level(self, budget_bytes: int) -> Bools:
        """The level of lowest score."""
        batch = self.simulator.run(np.stack(self.levels, axis=1))
        scores = self.searcher.score(batch, budget_bytes, self.searcher.weight)
        return self.levels[int(np.argmin(scores))]

    # -- what budgets share -------------------------------------------------------------------------------------------

    @property
    def segments(self) -> Segments:
        """The segments of the forward with their options."""
        return self.work.shared("segments", self._build_segments)

    def _build_segments(self) -> Segments:
        options = self.options
        lengths = options.short_segments + options.long_segments
        built = Segments(
            self.simulator, self.levels, self.pinned, options.max_segment_cuts, options, lengths, self.archive
        )
        self._in_segments = built.simulations
        return built

    @property
    def searcher(self) -> LocalSearch:
        """The local search over the pool of values."""
        return self.work.shared("local search", self._build_searcher)

    def _build_searcher(self) -> LocalSearch:
        forward_ns = sum(v.time_ns for v in self.problem.values if v.in_forward)
        weight = self.options.excess_weight * max(1, forward_ns) / max(1, self.peak(self.levels[0]))
        pool = search_pool(self.simulator, self.pinned, self.options.pool_share)
        self._made_searcher = LocalSearch(self.simulator, pool, self.pinned, weight, self.options, archive=self.archive)
        return self._made_searcher

    @cached_property
    def operands(self) -> OperandMoves:
        """Flips of the operands of each kernel."""
        return OperandMoves(self.simulator, self.pinned, self.options)

    @property
    def uses_moments(self) -> bool:
        """True if the options allow moments and the problem is small enough for them."""
        size = self.simulator.num_values + self.simulator.num_steps
        return self.options.uses_moments and size <= self.options.moment_nodes

    @cached_property
    def close_gap(self) -> float:
        """Gap that is good enough, as a fraction of the step: 0 if a branch and bound reaches the optimum."""
        return 0.0 if self.uses_moments and self.moments.branches else self.options.close_gap

    @cached_property
    def moments(self) -> MomentBound:
        """The bound from all buffers alive at a few moments."""
        return MomentBound(self.simulator, self.pinned, self.options)

    @cached_property
    def lp_points(self) -> LpBound:
        """The bound from the memory at many points, for plans that recompute each value at most once."""
        return LpBound(self.simulator, self.options)

    @cached_property
    def lp_points_of_all(self) -> LpBound:
        """The bound from the memory at many points, for plans that recompute values any number of times."""
        return LpBound(self.simulator, self.options, once=False)

    @cached_property
    def least_peak_bytes(self) -> int:
        """Bytes that the peak of no plan goes below."""
        return least_peak_bytes(self.simulator, self.pinned)


def _spread(cuts: list[Cut], most: int) -> list[Cut]:
    """Returns at most `most` points of the hull, both ends included."""
    if len(cuts) <= most:
        return cuts
    picks = np.unique(np.linspace(0, len(cuts) - 1, most).round().astype(int))
    return [cuts[k] for k in picks]
