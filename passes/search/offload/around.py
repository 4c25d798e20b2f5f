"""Plans around sets of buffers that are away, and the moves from one such set to the next.

A set of buffers that leaves is one half of a plan with copies.  The other half, what the rest keeps and recomputes, is the plan of
the problem in which these buffers take no memory while they are away (`absent`).  So each half follows from the other: the buffers
that a plan's own copies take away during its forward, and the plan around them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compile_remat.passes.memory.buffers import Bools, Ints
from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.memory.step_curve import Movable, StepCurve
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.search.moves.local_search import LocalSearch
from compile_remat.passes.search.offload.absent import without_moved
from compile_remat.passes.search.offload.copies import LEAST_BYTES, fewest, large_enough, queue, taken_away
from compile_remat.passes.search.offload.link import Link
from compile_remat.passes.search.offload.transfers import Transfers, transfers_of

if TYPE_CHECKING:
    from compile_remat.passes.search.solver import Planner

MOST_SETS = 6
"""Most sets of buffers that are tried one after the other, each that of the plan around the one before."""

GOOD_GAP = 0.003
"""A plan this close to the least time of all, as a part of the step, ends the search."""

TRIED_SETS = 2
"""Sets of a buffer more, a buffer less or another buffer that one round of moves tries at most, of each kind."""


@dataclass(frozen=True)
class Found:
    """A plan whose copies keep the budget.

    Attributes:
        saved: Mask of the saved values, [values].
        time_ns: Extra time of the plan with its copies.
    """

    saved: Bools
    curve: StepCurve
    made: Transfers
    time_ns: int


class Around:
    """Plans for one budget around sets of buffers that are away."""

    def __init__(self, planner: Planner, link: Link, budget_bytes: int) -> None:
        self.planner, self.link, self.budget_bytes = planner, link, budget_bytes

    def best_of(self, starts: Sequence[Bools], is_close: Callable[[Found, float], bool]) -> Found | None:
        """The fastest plan with copies from some plans, and from those around it; None if there is none.

        Args:
            is_close: Returns whether a plan is close to the fastest one, by a part of the step.
        """
        found = (self.found(saved) for saved in starts)
        best = min((each for each in found if each is not None), key=lambda each: each.time_ns, default=None)
        if not starts or (best is not None and is_close(best, GOOD_GAP)):
            return best
        for saved, away in self.plans(starts[0] if best is None else best.saved):
            near = self.found(saved, away)
            if best is not None and (near is None or near.time_ns >= best.time_ns):
                break
            best = near
            if best is not None and is_close(best, GOOD_GAP):
                break
        return best

    def plans(self, saved: Bools) -> Iterator[tuple[Bools, frozenset[int]]]:
        """Masks of plans with the values that are away, each around the buffers that the plan before takes away.

        Where a plan takes away a set that was tried, the value that is the cheapest to recompute stays from then on; where no plan
        around a set is found, its last value does.
        """
        seen, stays = set[frozenset[int]](), set[int]()
        while len(seen) < MOST_SETS and not self.planner.work.is_spent:
            curve = self.planner.curve(self._filled(saved))
            away = taken_away(curve, self.link, stays)
            key = frozenset(each.value for each in away)
            if key in seen:
                stays.add(self._by_gain(saved, np.array(sorted(key), dtype=np.int64))[0])
                away = taken_away(curve, self.link, stays)
                key = frozenset(each.value for each in away)
            if not away or key in seen:
                return
            seen.add(key)
            found = self.planner.on(self._without(curve, away)).saved_at_once(self.budget_bytes)
            if found is None:
                stays.add(away[-1].value)
                continue
            yield found, key
            saved = found

    def found(self, saved: Bools, away: Collection[int] = ()) -> Found | None:
        """The plan with few copies that keep the budget, of the first buffers or of those `away`; None if there are none."""
        curve = self.planner.curve(saved)
        sets = [large_enough(curve), [each for each in curve.movable if each.value in away]]
        found = [fewest(curve, buffers, self.link, self.budget_bytes) for buffers in sets if buffers]
        made = min((each for each in found if each is not None), key=lambda each: each.stall_ns, default=None)
        return None if made is None else self._found(saved, curve, made)

    def improved(self, found: Found) -> Found:
        """The plan after moves of single buffers, each followed by a local search for what the rest keeps and recomputes."""
        work = self.planner.work
        while not work.is_spent:
            tried = (self._tried(found, away) for away in self._neighbours(found))
            better = next((each for each in tried if each is not None and each.time_ns < found.time_ns), None)
            if better is None:
                break
            found = better
        return found

    def spared(self, found: Found) -> Found:
        """The same copies with fewer recomputed operations, if that counts as no slower."""
        search = self.planner.search
        saved = search.spared(found.saved, search.peak(found.saved))
        fewer = self._moving(saved, {each.value for each in found.made.moved})
        most_ns = found.time_ns + search.spared_rise_ns
        return fewer if fewer is not None and fewer.time_ns <= most_ns else found

    def _found(self, saved: Bools, curve: StepCurve, made: Transfers) -> Found:
        kept_ns = self.planner.search.time(saved) - self.planner.fastest_time_ns
        return Found(saved, curve, made, kept_ns + made.stall_ns)

    def _without(self, curve: StepCurve, away: Sequence[Movable]) -> Problem:
        return without_moved(self.planner.problem, curve, transfers_of(curve, away, self.link, sys.maxsize))

    # -- a link that is never idle ------------------------------------------------------------------------------------

    def _filled(self, saved: Bools) -> Bools:
        """A mask with recomputed values that leave while the link would be idle, those first that cost the most time a byte."""
        search = self.planner.search
        curve = self.planner.curve(saved)
        buffers = large_enough(curve)
        more = self._recomputed(saved)
        if not buffers or not len(more):
            return saved
        begun_ns, ends_ns = queue(curve, buffers, self.link)
        idle_ns = np.maximum(0, np.minimum(begun_ns, curve.forward_starts_ns[-1]) - np.append(0, ends_ns[:-1]))
        filled, nbytes = saved.copy(), search.simulator.nbytes
        for v in self._by_gain(saved, more):
            out_ns = self.link.out_ns(int(nbytes[v]))
            later = np.flatnonzero((begun_ns > curve.forward_starts_ns[v + 1]) & (idle_ns > 0))
            if idle_ns[later].sum() * 2 < out_ns:
                continue
            filled[v] = True
            for k in later.tolist():
                used_ns = min(out_ns, int(idle_ns[k]))
                idle_ns[k] -= used_ns
                out_ns -= used_ns
        return filled

    def _recomputed(self, saved: Bools) -> Ints:
        """The values that a plan recomputes, the fastest plan saves, and the link could take."""
        search = self.planner.search
        recomputed = search.simulator.one(saved).recomputed[:, 0]
        more = recomputed & search.levels[0] & ~saved & (search.simulator.nbytes >= LEAST_BYTES)
        return np.flatnonzero(more & search.simulator.is_in_forward)

    def _gains_ns(self, saved: Bools, flipped: Ints) -> Ints:
        """The time that a plan gains if each of some values changes sides alone."""
        columns = np.repeat(saved[:, None], len(flipped), axis=1)
        columns[flipped, np.arange(len(flipped))] ^= True
        return np.asarray(self.planner.search.time(saved) - self.planner.simulator.costs(columns)[0])

    # -- moves --------------------------------------------------------------------------------------------------------

    def _neighbours(self, found: Found) -> Iterator[frozenset[int]]:
        """Sets of values: the last one stays, the next one leaves, or others leave in place of those cheap to recompute."""
        moved = [each.value for each in found.made.moved]
        away, nbytes = frozenset(moved), self.planner.simulator.nbytes
        kept = [each.value for each in large_enough(found.curve) if each.value not in away]
        cheap = self._by_gain(found.saved, np.array(moved, dtype=np.int64))[:TRIED_SETS]
        dear = self._by_gain(found.saved, self._recomputed(found.saved))[:TRIED_SETS]
        yield away - {moved[-1]}
        yield away.union(kept[:1])
        for u in cheap:
            yield (away - {u}).union(_that_fit(kept, nbytes, int(nbytes[u])) or kept[:1])
        for v in dear:
            larger = [u for u in cheap if nbytes[u] >= nbytes[v]]
            yield away.difference(larger[:1] or cheap[:1]) | {v}

    def _by_gain(self, saved: Bools, values: Ints) -> list[int]:
        """Values in the order of the time a byte that a plan gains if they change sides, the largest gain first."""
        gains = self._gains_ns(saved, values) / self.planner.simulator.nbytes[values]
        return [int(v) for v in values[np.argsort(-gains, kind="stable")]]

    def _tried(self, found: Found, away: Collection[int]) -> Found | None:
        """A plan in which other values leave, and the rest is improved; None if there is none."""
        saved = found.saved.copy()
        saved[list(away)] = True
        curve = self.planner.curve(saved)
        buffers = [each for each in curve.movable if each.value in away]
        if len(buffers) < len(away):
            return None
        search = self.planner.search
        simulator = Simulator(self._without(curve, buffers), self.planner.work)
        pinned = search.pinned | saved & np.isin(np.arange(len(saved)), list(away))
        local = LocalSearch(simulator, search.searcher.pool, pinned, search.searcher.weight, search.options)
        return self._moving(local.run(saved, self.budget_bytes, search.options.rounds), away)

    def _moving(self, saved: Bools, away: Collection[int]) -> Found | None:
        """The plan that moves those of some values that it saves; None if it moves nothing or does not fit."""
        curve = self.planner.curve(saved)
        made = transfers_of(curve, [each for each in curve.movable if each.value in away], self.link, self.budget_bytes)
        fits = made.peak_bytes <= self.budget_bytes and made.host_bytes(self.link) <= self.link.host_bytes
        return self._found(saved, curve, made) if fits and made.moved else None


def _that_fit(values: Sequence[int], nbytes: Ints, room_bytes: int) -> list[int]:
    """The first values, as many as there is room for."""
    ends = np.cumsum(nbytes[list(values)])
    return list(values[: int(np.searchsorted(ends, room_bytes, side="right"))])
