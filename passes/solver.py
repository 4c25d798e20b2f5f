"""`Problem` -> `Plan`: levels by min-cut, spans by dynamic programme, polish by local search, a lower bound beside it.

One code path for every graph.  All loops run in index order and count plans tried, not seconds, so that the same problem
gives the same plan in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from compile_remat.passes import kicks
from compile_remat.passes.bounds import Moments, at_the_begin
from compile_remat.passes.crossover import cross
from compile_remat.passes.descent import Descent
from compile_remat.passes.effort import Effort, default_units, units_of
from compile_remat.passes.liveness import timeline_of
from compile_remat.passes.min_cut import (
    Cut,
    CutSolver,
    hull,
    lower_bound_ns,
    pinned_indices,
)
from compile_remat.passes.nested import Candidate, Nested, candidate, original
from compile_remat.passes.plan import Plan, Status
from compile_remat.passes.polish import Polisher
from compile_remat.passes.problem import Problem
from compile_remat.passes.simulate import Bools, Simulator
from compile_remat.passes.spans import Spans

MAX_LEVELS = 9
POLISH_ROUNDS = 3

TARGETS = (1.0, 0.985, 0.95, 0.9)
"""Where the search ends a little above the budget, it aims lower: at these parts of it, one after the other."""

CLOSE_GAP = 0.015
"""A plan this close to its lower bound, as a part of the step, is good enough: no better plan and no better bound is sought."""

FLOOR_SHARES = (0.3, 0.9)
"""The search within a budget looks for the floor at these parts of the lowest peak so far."""

FLOOR_GAIN = 0.998
"""Of plans whose peaks differ by less than this factor the fastest is called the lowest."""

LOWER_SHARES = (0.95, 0.9)
"""Where the gap stays open, plans for these parts of the budget are tried for it, too."""

PRESS_SHARES = (0.8, 0.93, 0.97)
"""A plan is pressed down by aiming at these parts of its peak, one after the other."""

PRESS_ROUNDS = 6

FLOOR_BISECTIONS = 7
"""Budgets tried to find the lowest that the spans can meet."""

TRUSTED_GAIN = 0.01
"""`max` leaves torch's own choice for an estimated gain of at least this part of the step."""

EXCESS_WEIGHT = 4.0
"""A peak twice the budget counts like this many forward passes."""


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """The fastest plan found whose predicted peak is at most `budget_bytes`; status INFEASIBLE if there is none."""
    return Planner(problem).within(budget_bytes)


class Planner:
    """Plans of one problem; what several budgets share is worked out once.

    Args:
        work_seconds: The work of one search, counted as so many seconds of a small server's core (see `effort`); then the best
            plan found so far stands.  None is a limit by the size of the problem.  The lowest peak is a search of its own.
    """

    def __init__(self, problem: Problem, work_seconds: float | None = None) -> None:
        self.problem, self.work_seconds = problem, work_seconds
        nodes = len(problem.values) + len(problem.steps)
        self.effort = Effort(default_units(nodes) if work_seconds is None else units_of(work_seconds))
        self.simulator = Simulator(problem, self.effort)
        self.cuts = CutSolver(problem)
        self.hull: list[Cut] = hull(self.cuts)
        self.pinned = self._mask(pinned_indices(problem))
        self.levels = [self._mask(c.saved) | self.pinned for c in _spread(self.hull, MAX_LEVELS)]
        self.fastest_time_ns = min(c.time_ns for c in self.hull)
        self._in_spans = 0
        self._has_polished: Polisher | None = None

    @property
    def simulations(self) -> int:
        """Plans tried so far, nested ones not counted."""
        return self._in_spans + (self._has_polished.simulations if self._has_polished is not None else 0)

    # -- what a caller asks -------------------------------------------------------------------------------------------

    def fastest(self) -> Plan:
        """The fastest plan of any size: exact, by the cut at price 0."""
        return self.plan_of(self._mask(self.hull[0].saved) | self.pinned, None)

    def reference(self) -> Plan:
        """The fastest plan whose peak and moved bytes do not exceed those of torch's own choice (`max`)."""
        torch_mask = self._mask(self.problem.reference) | self.pinned
        candidates = np.stack([torch_mask, *self.levels], axis=1)
        batch = self.simulator.run(candidates)
        moved, written_ns = batch.saved_bytes, self.simulator.save_time_ns @ batch.used
        fits = (batch.peak <= batch.peak[0]) & (moved <= moved[0]) & (written_ns <= written_ns[0])
        order = np.lexsort((np.arange(len(fits)), batch.time_ns))
        best = next(int(k) for k in order if fits[k])
        if batch.time_ns[0] - batch.time_ns[best] < TRUSTED_GAIN * self.problem.step_time_ns:
            best = 0  # its own choice stands
        return self.plan_of(candidates[:, best], None)

    def torchs_own(self, budget_bytes: int | None) -> Plan:
        """The plan that saves the problem's `reference` and what must be saved, whatever its peak."""
        return self.plan_of(self._mask(self.problem.reference) | self.pinned, budget_bytes)

    def within(self, budget_bytes: int, *, once: bool = False) -> Plan:
        """The fastest plan found within the budget, else the one of lowest peak with status INFEASIBLE.

        Args:
            once: Whether no value may be recomputed more than once.  Such plans come first in any case: the others take
                more time.
        """
        quick = self._mask(self.hull[0].saved) | self.pinned
        if self._peak(quick) <= budget_bytes:
            return self.plan_of(quick, budget_bytes)
        with self.effort.search():
            return self._within(budget_bytes, once=once)

    def _within(self, budget_bytes: int, *, once: bool) -> Plan:
        for share in TARGETS:
            if self.effort.is_spent:
                break
            masks = self._candidates(int(budget_bytes * share))
            feasible = [m for m in masks if self._peak(m) <= budget_bytes]
            if feasible:
                fastest = min(feasible, key=self._time)
                return self.plan_of(self._improved(fastest, budget_bytes), budget_bytes)
        nested = None if once else self._lowest_nested
        found = [] if nested is None else [nested]
        if nested is not None and nested.peak_bytes <= budget_bytes:
            found.append(self._nested.within(budget_bytes) or nested)
        fitting = [m for m in self._floors if self._peak(m) <= budget_bytes]
        if fitting:
            lowest = min(fitting, key=self._time)
            found += [self._once(m) for m in (self._polish(lowest, budget_bytes, rounds=POLISH_ROUNDS), lowest)]
        else:
            found.append(self._once(min(self._floors, key=self._peak)))
        best = [c for c in found if c.peak_bytes <= budget_bytes]
        return self._plan_of(
            min(best, key=lambda c: c.time_ns) if best else min(found, key=lambda c: c.peak_bytes), budget_bytes
        )

    def lowest(self, *, once: bool = False) -> Plan:
        """The plan of lowest peak found (`min`); `once` as in `within`."""
        nested = None if once else self._lowest_nested
        return self.plan_of(self._floors[0], None) if nested is None else self._plan_of(nested, None)

    def plan_of(self, mask: Bools, budget_bytes: int | None, again: Sequence[str] = ()) -> Plan:
        """Describe the plan that saves the values in `mask` and computes those in `again` twice in the backward."""
        if again:
            return self._plan_of(candidate(self.problem, mask, again, self.effort), budget_bytes)
        return self._plan_of(self._once(mask), budget_bytes)

    def _once(self, mask: Bools) -> Candidate:
        return Candidate(mask, (), self.simulator, self.simulator.one(mask))

    def _plan_of(self, found: Candidate, budget_bytes: int | None) -> Plan:
        simulator, batch = found.simulator, found.batch
        names = [original(v.name, found.again) for v in simulator.problem.values]
        seen = timeline_of(simulator, found.saved)
        extra = int(batch.time_ns[0]) - self.fastest_time_ns
        limit_bytes = seen.peak_bytes if budget_bytes is None else budget_bytes
        bound = self._bound(limit_bytes, extra, once=not found.again)
        if budget_bytes is not None and seen.peak_bytes > budget_bytes:
            status = Status.INFEASIBLE
        else:
            status = Status.OPTIMAL if extra <= bound else Status.FEASIBLE
        return Plan(
            problem_key=self.problem.key(),
            status=status,
            budget_bytes=budget_bytes,
            saved=tuple(names[v] for v in np.flatnonzero(batch.used[:, 0])),
            recomputed=tuple(dict.fromkeys(names[v] for v in np.flatnonzero(batch.recomputed[:, 0]))),
            again=found.again,
            peak_bytes=seen.peak_bytes,
            forward_peak_bytes=seen.forward_peak_bytes,
            saved_bytes=int(batch.saved_bytes[0]),
            output_bytes=simulator.output_bytes,
            step_time_ns=self.problem.step_time_ns,
            recompute_time_ns=int(simulator.time_ns @ batch.recomputed[:, 0]),
            extra_time_ns=extra,
            bound_time_ns=bound,
            largest=seen.largest,
            simulations=self.simulations + (self._nested.simulations if found.again else 0),
        )

    def mask_of(self, names: Iterable[str]) -> Bools:
        """The mask that saves the named values, for plans from a file; KeyError names one that cannot be saved."""
        index = {v.name: i for i, v in enumerate(self.problem.values) if v.is_saveable}
        return self._mask([index[name] for name in names]) | self.pinned

    # -- the search ---------------------------------------------------------------------------------------------------

    @property
    def spans(self) -> Spans:
        """Spans with their options, shared by all budgets."""
        return self.effort.shared("spans", self._build_spans)

    def _build_spans(self) -> Spans:
        spans = Spans(self.simulator, self.levels, self.pinned)
        self._in_spans = spans.build()
        return spans

    def _spaced(self, budget_bytes: int) -> Bools | None:
        """The plan of the spans; None where there is none, or no work left to look for it."""
        return None if self.effort.is_spent else self.spans.plan(budget_bytes)

    def _candidates(self, budget_bytes: int) -> list[Bools]:
        """Polished plans: a first round from both kinds of start, the rest from the better; then what fits, or nearly."""
        starts = [self._best_level(budget_bytes)]
        spaced = self._spaced(budget_bytes)
        if spaced is not None:
            starts.append(spaced)
        found = [self._polish(start, budget_bytes, rounds=1) for start in starts]
        found.sort(key=lambda m: self._score(m, budget_bytes))
        best = self._finish(found[0], budget_bytes)
        return [best, *found, *starts]

    def _finish(self, start: Bools, budget_bytes: int) -> Bools:
        """Polish to the end; what does not fit yet, once more with more weight on the budget."""
        best = self._polish(start, budget_bytes, rounds=POLISH_ROUNDS)
        if self._peak(best) > budget_bytes:
            best = self._polish(best, budget_bytes, rounds=POLISH_ROUNDS, weight_factor=10.0)
        return best

    def _improved(self, mask: Bools, budget_bytes: int) -> Bools:
        """A plan that fits, or a faster one that fits too, sought where the bound leaves room for it."""
        if self._is_open(mask, budget_bytes):
            start = self._descent.start(budget_bytes)
            mask = self._faster(mask, self._finish(start, budget_bytes), budget_bytes)
        if self._is_open(mask, budget_bytes):
            for weight_factor in (1.0, 10.0):
                crossed = cross(self._polisher, mask, self.levels, budget_bytes, weight_factor)
                mask = self._faster(mask, crossed, budget_bytes)
        for share in LOWER_SHARES:  # a plan for less may be faster than what was found
            if self._is_open(mask, budget_bytes):
                lower = self._candidates(int(budget_bytes * share))[0]
                mask = self._faster(mask, lower, budget_bytes)
        return mask

    def _is_open(self, mask: Bools, budget_bytes: int) -> bool:
        """Whether a plan within the budget may be faster by more than is worth leaving, and there is work left to find it."""
        if self.effort.is_spent:
            return False
        extra = self._time(mask) - self.fastest_time_ns
        return extra - self._bound(budget_bytes, extra) > CLOSE_GAP * self.problem.step_time_ns

    def _faster(self, mask: Bools, other: Bools, budget_bytes: int) -> Bools:
        """The other plan if it fits and is faster than the one that fits."""
        return other if self._peak(other) <= budget_bytes and self._time(other) < self._time(mask) else mask

    @property
    def _descent(self) -> Descent:
        return self.effort.shared("descent", lambda: Descent(self._polisher, self.levels, self._peak(self.levels[0])))

    @cached_property
    def _floors(self) -> list[Bools]:
        """Plans of low peak, pressed down from several starts; the one to be called the lowest stands first."""
        with self.effort.search():
            return self._pressed_down()

    def _pressed_down(self) -> list[Bools]:
        peaks = self.simulator.run(np.stack(self.levels, axis=1)).peak
        starts = [self.levels[int(np.argmin(peaks))]]
        low, high = self._unavoidable_bytes(), int(peaks.min())
        for _ in range(FLOOR_BISECTIONS):
            if self.effort.is_spent:
                break
            target = (low + high) // 2
            spaced = self._spaced(target)
            peak = None if spaced is None else self._peak(spaced)
            if spaced is not None:
                starts.append(spaced)
            if peak is not None and peak <= target:
                high = peak
            else:
                low = target
        starts = sorted(starts, key=self._peak)[:2]
        pressed = [self._polish(m, int(0.9 * self._peak(m)), rounds=1, weight_factor=10.0) for m in starts]
        best = min([*pressed, *starts], key=self._peak)
        for share in PRESS_SHARES:
            best = self._press(best, share)
        best = kicks.lower(self._polisher, best, POLISH_ROUNDS, weight_factor=10.0)
        floors = [best]
        for share in FLOOR_SHARES:
            if self.effort.is_spent:
                break
            floors.append(min(self._candidates(int(self._peak(best) * share)), key=self._peak))
            best = min(floors, key=self._peak)
        near = self._peak(best) / FLOOR_GAIN
        return sorted(floors, key=lambda m: (self._peak(m) > near, self._time(m)))

    @cached_property
    def _nested(self) -> Nested:
        """Plans that recompute some values more than once."""
        return Nested(self.simulator, self.levels[-1], self.pinned, self._polisher.weight)

    @cached_property
    def _lowest_nested(self) -> Candidate | None:
        """The plan of lowest peak among those, where it is below that of all others."""
        lowest = min(self._peak(m) for m in self._floors)
        with self.effort.search():
            return self._nested.lowest(self._unavoidable_bytes(), int(lowest * FLOOR_GAIN))

    def _unavoidable_bytes(self) -> int:
        """Live at the end of every backward: gradients and outputs."""
        simulator = self.simulator
        kept = simulator.step_last >= simulator.num_steps
        return simulator.output_bytes + int(simulator.step_bytes[kept].sum())

    def _press(self, mask: Bools, share: float) -> Bools:
        """Aim below the plan's peak; the plan itself where that does not lower it."""
        target = int(self._peak(mask) * share)
        return min(mask, self._polish(mask, target, rounds=PRESS_ROUNDS, weight_factor=10.0), key=self._peak)

    def _best_level(self, budget_bytes: int) -> Bools:
        batch = self.simulator.run(np.stack(self.levels, axis=1))
        scores = self._polisher.score(batch, budget_bytes, self._polisher.weight)
        return self.levels[int(np.argmin(scores))]

    @property
    def _polisher(self) -> Polisher:
        return self.effort.shared("polisher", self._build_polisher)

    def _build_polisher(self) -> Polisher:
        forward_ns = sum(v.time_ns for v in self.problem.values if v.in_forward)
        weight = EXCESS_WEIGHT * max(1, forward_ns) / max(1, self._peak(self.levels[0]))
        self._has_polished = Polisher(self.simulator, self.simulator.pool(self.pinned), self.pinned, weight)
        return self._has_polished

    def _polish(self, mask: Bools, budget_bytes: int, rounds: int, weight_factor: float = 1.0) -> Bools:
        return self._polisher.run(mask, budget_bytes, rounds, weight_factor)

    # -- small things -------------------------------------------------------------------------------------------------

    def _bound(self, budget_bytes: int, otherwise_ns: int, *, once: bool = True) -> int:
        """Extra time that no plan within the budget can avoid, or with `once`, none that computes a value more than twice.

        The cut asks what has to be recomputed for the begin of the backward.  Where that is not close to the plan's own
        time, all other moments are asked as well: there, what is alive may be computed again later, but `once`.
        """
        fixed_bytes = at_the_begin(self.simulator).fixed_bytes
        before = self.cuts.num_cuts
        least_ns = lower_bound_ns(self.cuts, self.hull, budget_bytes - fixed_bytes)
        self.effort.charge((self.cuts.num_cuts - before) * len(self.cuts.rows))
        if least_ns is None:
            return otherwise_ns
        bound = max(0, least_ns - self.fastest_time_ns)
        if not once or otherwise_ns - bound <= CLOSE_GAP * self.problem.step_time_ns:
            return bound
        self.effort.charge(len(self._moments.rows))
        return max(bound, self._moments.least_time_ns(budget_bytes) - self.fastest_time_ns)

    @cached_property
    def _moments(self) -> Moments:
        return Moments(self.simulator)

    def _mask(self, indices: Iterable[int]) -> Bools:
        mask = np.zeros(len(self.problem.values), dtype=bool)
        mask[list(indices)] = True
        return mask

    def _peak(self, mask: Bools) -> int:
        return int(self.simulator.one(mask).peak[0])

    def _score(self, mask: Bools, budget_bytes: int) -> float:
        batch = self.simulator.one(mask)
        return float(self._polisher.score(batch, budget_bytes, self._polisher.weight)[0])

    def _time(self, mask: Bools) -> int:
        return int(self.simulator.one(mask).time_ns[0])


def _spread(cuts: list[Cut], most: int) -> list[Cut]:
    """At most `most` points of the hull, both ends included."""
    if len(cuts) <= most:
        return cuts
    picks = np.unique(np.linspace(0, len(cuts) - 1, most).round().astype(int))
    return [cuts[k] for k in picks]
