"""Plans that recompute some values twice, to reach peaks below those that one recomputation of each value can reach.

A *recursive* segment runs twice in the backward.  Its first run keeps a few values inside, its *inner* checkpoints; the values
between two inner checkpoints are recomputed once more when the gradients get there.  In the joint graph, each value that runs
twice has a second copy: the first run computes the originals, the copies read the inner checkpoints and each other, and the
backward steps read the copies.  Liveness, cuts and extraction treat the graph with copies like any other graph.

The dynamic programme of `segments` chooses the recursive segments: for each pair of cuts, it gets further options with the best
places of one to six inner checkpoints.  The time and the local peak of such an option are composed from the simulated segments
between the checkpoints.  The chosen plan is simulated on the graph with copies, options that turn out worse are corrected, and
local search improves the plan there.  The idea is that of revolve (Griewank and Walther, ACM TOMS 2000), with two levels and on
segments of any graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from compile_remat.passes.memory.candidate_plan import Candidate, candidate, has_copy, may_run_again, widened
from compile_remat.passes.memory.simulator import Batch, Bools, Simulator
from compile_remat.passes.problem.duplication import original
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.search.moves import perturbation
from compile_remat.passes.search.moves.local_search import LocalSearch, search_pool
from compile_remat.passes.search.options import DEFAULT, SearchOptions
from compile_remat.passes.search.segment_dp import Key, Option, SegmentTable
from compile_remat.passes.search.segments import Segments

KEPT, KEPT_NODES = 16, 100_000
"""Simulated plans that are kept: `KEPT`, or more while their problems have at most `KEPT_NODES` values and steps together."""


@dataclass(frozen=True)
class _Chain:
    """Consecutive segments; the end of each segment but the last is an inner checkpoint.

    Attributes:
        peak_bytes: The local peak: all live bytes except those saved before the chain.
        kept_bytes: Bytes that the segments save, inner checkpoints included.
        time_ns: Time to recompute the values of the segments once more.
        lengths: Length of each segment, in cuts.
    """

    peak_bytes: int
    kept_bytes: int
    time_ns: int
    lengths: tuple[int, ...]

    def __add__(self, option: Option) -> _Chain:
        return _Chain(
            max(self.peak_bytes, self.kept_bytes + option.local_peak_bytes),
            self.kept_bytes + option.charge_bytes,
            self.time_ns + option.time_ns,
            (*self.lengths, option.last - option.first),
        )


class Recursion:
    """Recursive segments of one problem; results that several budgets share are computed once.

    Args:
        level: Mask of the values, few, that a segment saves inside besides its entry, [values].
        pinned: Mask of the values that must be saved, [values].
        weight: Price of a byte above the budget, ns, as in `LocalSearch`.
    """

    def __init__(
        self, simulator: Simulator, level: Bools, pinned: Bools, weight: float, options: SearchOptions = DEFAULT
    ) -> None:
        self.simulator, self.level, self.pinned, self.weight, self.options = simulator, level, pinned, weight, options
        cuts, parts = options.recursive_segment_cuts, options.recursive_parts
        self.segments = Segments(simulator, [level], pinned, cuts, options, parts)
        self.inner: dict[Key, tuple[int, ...]] = {}  # bounds of the inner checkpoints, by option
        self._known: OrderedDict[tuple[bytes, bytes], Candidate] = OrderedDict()
        self.table = SegmentTable(self._with_recursive(self.segments.charging_whole_frontiers()).values())
        self._ended = self.segments.simulations  # plans tried before the search that runs now
        self._running: LocalSearch | None = None

    @property
    def simulations(self) -> int:
        """Number of plans tried so far."""
        return self._ended + (0 if self._running is None else self._running.simulations)

    def within(self, budget_bytes: int) -> Candidate | None:
        """The fastest plan found within the budget; None if there is none."""
        found = self._from_segments(budget_bytes)
        if found is None:
            return None
        improved = self.improved(found, budget_bytes)
        fitting = [c for c in (found, improved) if c.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda c: c.time_ns, default=None)

    def lowest(self, low_bytes: int, high_bytes: int) -> Candidate | None:
        """The plan of lowest peak found between the two peaks; None if no plan is clearly below `high_bytes`."""
        best = self._clearly_below(high_bytes)
        if best is None:
            return None
        high_bytes = best.peak_bytes
        for _ in range(self.options.recursive_bisections):
            if self.simulator.work.is_spent:
                break
            target = (low_bytes + high_bytes) // 2
            found = self._from_segments(target)
            if found is not None and found.peak_bytes < best.peak_bytes:
                best, high_bytes = found, found.peak_bytes
            if found is None or found.peak_bytes > target:
                low_bytes = target
            if low_bytes >= high_bytes:
                break
        improved = self.improved(best, best.peak_bytes)
        return improved if improved.peak_bytes <= best.peak_bytes else best

    def _clearly_below(self, high_bytes: int) -> Candidate | None:
        """A plan within `high_bytes` times the first of `SearchOptions.recursive_targets`; None if no plan is found.

        The search tries lower targets as well: a plan may meet a lower target after a higher one failed, because the corrected
        options depend on the target.
        """
        targets = [int(share * high_bytes) for share in self.options.recursive_targets]
        for target in targets:
            found = self._from_segments(target)
            if found is not None and found.peak_bytes <= targets[0]:
                return found
            if found is None or self.simulator.work.is_spent:
                break  # no path of uncorrected options fits, so none fits a lower target
        return None

    # -- options ------------------------------------------------------------------------------------------------------

    def _with_recursive(self, measured: Mapping[Key, Option]) -> dict[Key, Option]:
        """Adds the chain of least peak for each pair of cuts and number of inner checkpoints, while more checkpoints lower it."""
        options, count, tuning = dict(measured), len(self.segments.bounds) - 1, self.options
        segments = [(a, length) for length in tuning.recursive_parts for a in range(count - length + 1)]
        single = {(a, length): options.get((a, a + length, 0)) for a, length in segments}
        full_ns = self.segments.times_until(self.simulator.one(self.pinned))
        chains = {key: _Chain(0, 0, 0, ()) + option for key, option in single.items() if option is not None}
        lowest = {key: chain.peak_bytes for key, chain in chains.items()}
        for level in range(1, tuning.max_inner_checkpoints + 1):
            chains = _longer(chains, single, count, tuning)
            for (first, length), chain in sorted(chains.items()):
                if length not in tuning.recursive_lengths or chain.peak_bytes >= lowest.get(
                    (first, length), chain.peak_bytes + 1
                ):
                    continue
                lowest[first, length] = chain.peak_bytes
                last = first + length
                ends = tuple((first + np.cumsum(chain.lengths[:-1])).tolist())
                end = options[ends[-1], last, 0]
                time_ns = chain.time_ns + int(full_ns[ends[-1]] - full_ns[first])
                self.inner[first, last, level] = ends
                options[first, last, level] = Option(first, last, level, end.charge_bytes, time_ns, chain.peak_bytes)
        return options

    # -- plans --------------------------------------------------------------------------------------------------------

    def _from_segments(self, budget_bytes: int) -> Candidate | None:
        """The plan that the dynamic programme finds, which may still exceed the budget; None if there is none."""
        table = self.table
        best: Candidate | None = None
        for turn in range(self.options.recursive_rounds):
            if turn and self.simulator.work.is_spent:
                break
            path = self.segments.shortest(table, budget_bytes)
            if path is None:
                break
            found, base = self._candidate(path)
            if best is None or found.peak_bytes < best.peak_bytes:
                best = found
            changes = self.segments.corrections(found.batch, path, base) if found.peak_bytes > budget_bytes else {}
            if not changes:
                break
            table = table.corrected(changes)
        return best

    def _candidate(self, path: Sequence[Option]) -> tuple[Candidate, Batch]:
        """The plan of a path on the problem with copies, and the batch of its saved values on the problem without copies."""
        bounds, position = self.segments.bounds, self.simulator.position
        saved = self.segments.union([o.first - 1 for o in path if o.first > 0]) | self.level
        kept, twice = np.zeros_like(saved), np.zeros_like(saved)
        for option in path:
            ends = self.inner.get((option.first, option.last, option.level), ())
            if ends:
                twice |= (position > bounds[option.first]) & (position <= bounds[ends[-1]])
                kept |= self.segments.union([end - 1 for end in ends])
        base = self.simulator.one(saved)
        twice &= base.recomputed[:, 0] & ~kept & self._may_run_again
        self._ended += 2
        return self._simulated(saved, twice), base

    def _simulated(self, saved: Bools, twice: Bools) -> Candidate:
        """Simulates the plan of the two masks, [values]; keeps the last simulations, because paths come back."""
        key = saved.tobytes(), twice.tobytes()
        found = self._known.pop(key, None)
        if found is None:
            problem = self.simulator.problem
            names = [problem.values[v].name for v in np.flatnonzero(twice)]
            found = candidate(problem, saved, names, self.simulator.work)
        else:
            found.simulator.one(found.saved)  # charges the work again
        self._known[key] = found
        nodes = self.simulator.num_values + self.simulator.num_steps
        if len(self._known) > max(KEPT, KEPT_NODES // nodes):
            self._known.popitem(last=False)
        return found

    @cached_property
    def _may_run_again(self) -> Bools:
        return np.array([may_run_again(v) for v in self.simulator.problem.values], dtype=bool)

    def improved(self, found: Candidate, budget_bytes: int) -> Candidate:
        """The plan after local search for a budget, which the plan may still exceed; the values computed twice stay the same."""
        options = self.options
        return self._searched(
            found, lambda on: on.run(found.saved, budget_bytes, options.min_peak_rounds, options.strict_factor)
        )

    def shaken(self, found: Candidate) -> Candidate:
        """The plan, or a lower one from its random neighbours; the values computed twice stay the same."""
        options = self.options
        return self._searched(
            found, lambda on: perturbation.lower(on, found.saved, options.rounds, options.strict_factor)
        )

    def _searched(self, found: Candidate, search: Callable[[LocalSearch], Bools]) -> Candidate:
        searcher = search_on(found, self.simulator.problem, self.pinned, self.weight, self.options)
        self._running = searcher
        mask = search(searcher)
        self._ended += searcher.simulations
        self._running = None
        return replace(found, saved=mask, batch=found.simulator.one(mask))


def search_on(
    found: Candidate, problem: Problem, pinned: Bools, weight: float, options: SearchOptions = DEFAULT
) -> LocalSearch:
    """A local search for plans that compute the same values twice as `found` does, over masks of the problem with copies.

    Args:
        problem, pinned: The problem without copies, and its values that must be saved, [values].
        weight: As in `LocalSearch`.
    """
    values = found.simulator.problem.values
    copied = np.array([original(v.name, found.again) in found.again for v in values], dtype=bool)
    wide = widened(pinned, has_copy(problem, found.again))
    pool = search_pool(found.simulator, wide, options.pool_share, ~copied)
    return LocalSearch(found.simulator, pool, wide, weight, options)


def _longer(
    chains: dict[tuple[int, int], _Chain],
    single: dict[tuple[int, int], Option | None],
    count: int,
    tuning: SearchOptions,
) -> dict[tuple[int, int], _Chain]:
    """The chains of least peak with one more segment at the end, by first bound and length."""
    found: dict[tuple[int, int], tuple[int, _Chain, Option]] = {}
    for (first, length), chain in chains.items():
        for more in tuning.recursive_parts:
            whole = length + more
            option = single.get((first + length, more))
            if option is None or whole > tuning.recursive_lengths[-1] or first + whole > count:
                continue
            peak_bytes, known = (
                max(chain.peak_bytes, chain.kept_bytes + option.local_peak_bytes),
                found.get((first, whole)),
            )
            if known is None or peak_bytes < known[0]:
                found[first, whole] = peak_bytes, chain, option
    return {key: chain + option for key, (_, chain, option) in found.items()}
