"""A lower bound on time from all bytes live at a few moments: the moments at which a rounded solution needs too much memory.

First, the programme of the begin of the backward is solved, its answer rounded to a plan, and the plan simulated.  Where the plan
exceeds the budget most, in forward and backward, moments are added (`moments`), and the programme is solved again: a cutting-plane
method.  The rounded answers are also starts for the search, because they weigh all these moments together.

If a plan has few values to decide on (`SearchOptions.branch_values`), HiGHS makes the programme's answers integral by branch and
bound, and moments are added where the plan of such an answer exceeds the budget.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from compile_remat.passes.memory.simulator import Bools, Floats, Ints, Simulator
from compile_remat.passes.search.bounds.lp_bound import at_the_begin
from compile_remat.passes.search.bounds.moments import Moments
from compile_remat.passes.search.bounds.programme import Away, Programme
from compile_remat.passes.search.options import DEFAULT, SearchOptions


@dataclass(frozen=True)
class Proof:
    """The result of the programme at one budget.

    Attributes:
        least_time_ns: No plan that recomputes each value at most once is faster.  After a branch and bound, this time is as exact
            as the solver's arithmetic.
        starts: Masks of saved values, [values], from the programme's rounded or integral answers.
        may_rise: True if more moments may raise the bound and give starts.
    """

    least_time_ns: int
    starts: tuple[Bools, ...]
    may_rise: bool = False


class MomentBound:
    """Bounds of one problem.

    Args:
        away: Bytes that may be on the host, see `Programme`.
    """

    def __init__(
        self, simulator: Simulator, pinned: Bools, options: SearchOptions = DEFAULT, away: Sequence[Away] = ()
    ) -> None:
        self.simulator, self.pinned, self.options, self.away = simulator, pinned, options, away
        self._begins: dict[int, tuple[int, Bools | None]] = {}
        self._proofs: dict[int, Proof] = {}

    def proof(self, budget_bytes: int, enough_ns: float = math.inf) -> Proof:
        """The proof at a budget, computed once for each budget.

        Args:
            enough_ns: A bound that is high enough: others are sought only if one moment of each graph proves less.
        """
        found = self._proofs.get(budget_bytes)
        if found is None and enough_ns < math.inf and not self.branches:
            found = self._proofs[budget_bytes] = self._quick(budget_bytes)
        if found is None or (found.may_rise and found.least_time_ns < enough_ns):
            found = self._proofs[budget_bytes] = self._worked_out(budget_bytes)
        return found

    @cached_property
    def branches(self) -> bool:
        """True if so few values are left to decide on that a branch and bound is affordable."""
        return int((self.simulator.is_saveable & ~self.pinned).sum()) <= self.options.branch_values

    def known(self, budget_bytes: int) -> Proof | None:
        """The proof at this budget as far as it is computed already."""
        return self._proofs.get(budget_bytes)

    def _quick(self, budget_bytes: int) -> Proof:
        """The bound from one moment of each graph, the one that exceeds the budget most."""
        programme, least_ns, rounded = self._begun(budget_bytes)
        if rounded is None:
            return Proof(0, ())
        steps, places = self._exceeding(rounded, budget_bytes, (), ())
        if not (steps or places):
            return Proof(max(0, least_ns), _distinct(rounded))
        self._add(programme, steps[:1], places[:1])
        proven_ns, again = self._solved(programme, budget_bytes)
        starts = [rounded] if again is None else [rounded, again]
        return Proof(max(0, least_ns, proven_ns), _distinct(*starts), may_rise=again is not None)

    def _worked_out(self, budget_bytes: int) -> Proof:
        """The bound and the starts from all moments that the options allow."""
        programme, least_ns, rounded = self._begun(budget_bytes)
        backward, forward, starts = set[int](), set[int](), list[Bools]()
        least_ns, gain_ns = max(0, least_ns), 0
        for turn in range(self.options.moment_rounds + 1):
            if rounded is None:
                break
            starts.append(rounded)
            steps, places = self._exceeding(rounded, budget_bytes, backward, forward)
            if turn == self.options.moment_rounds or not (steps or places) or (turn and gain_ns < self._worth_ns):
                break
            self._add(programme, steps, places)
            backward.update(steps)
            forward.update(places)
            proven_ns, rounded = self._solved(programme, budget_bytes)
            gain_ns, least_ns = proven_ns - least_ns, max(least_ns, proven_ns)
        for _ in range(self.options.branch_rounds if self.branches else 0):
            proven_ns, answer = programme.branch(budget_bytes, self.options.branch_nodes, self.options.branch_seconds)
            least_ns = max(least_ns, proven_ns)
            if answer is None:
                break
            whole = self._saving(answer, [0.5])
            starts.append(whole)
            steps, places = self._exceeding(whole, budget_bytes, backward, forward)
            if not (steps or places):
                break
            self._add(programme, steps, places)
            backward.update(steps)
            forward.update(places)
        return Proof(least_ns, _distinct(*starts))

    def _begun(self, budget_bytes: int) -> tuple[Programme, int, Bools | None]:
        """The programme of the begin of the backward with its bound and its answer, rounded; None if no plan saves so little."""
        programme = self._programme()
        if budget_bytes not in self._begins:
            self._begins[budget_bytes] = self._solved(programme, budget_bytes)
        return programme, *self._begins[budget_bytes]

    def _solved(self, programme: Programme, budget_bytes: int) -> tuple[int, Bools | None]:
        """The programme's bound, and its answer rounded to plans; None if there is no answer."""
        self.simulator.work.charge(programme.num_entries)
        solution = programme.solve(budget_bytes)
        if solution.values is None:
            return 0, None
        proven_ns = programme.proven_ns(solution.multipliers, budget_bytes)
        return proven_ns, self._saving(solution.values, self.options.rounding_levels)

    @cached_property
    def _worth_ns(self) -> float:
        """Time that a round of moments has to add to the bound to be followed by another; 0 if a branch and bound follows."""
        return 0.0 if self.branches else self.options.moment_gain * self.simulator.problem.step_time_ns

    def _add(self, programme: Programme, steps: Collection[int], places: Collection[int]) -> None:
        for b in steps:
            self._moments.backward(programme, b)
        for place in places:
            self._moments.forward(programme, place)

    def _programme(self) -> Programme:
        programme, begin = Programme(self.simulator, self.away), at_the_begin(self.simulator)
        nbytes = self.simulator.saved_nbytes
        entries = [entry for v in np.flatnonzero(nbytes).tolist() for entry in programme.saved(v, int(nbytes[v]))]
        programme.point(entries, begin.fixed_bytes)
        return programme

    def _saving(self, answer: Floats, levels: Sequence[float]) -> Bools:
        """Rounds an answer to plans, [values, plans]: plan k saves the values whose saved fraction exceeds ``levels[k]``."""
        n = self.simulator.num_values
        saved = answer[:n] - answer[n : 2 * n]
        return np.asarray(
            ((saved[:, None] > np.array(levels)) & self.simulator.is_saveable[:, None]) | self.pinned[:, None],
            dtype=bool,
        )

    def _exceeding(
        self, plans: Bools, budget_bytes: int, backward: Collection[int], forward: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """New moments: the steps and the places of the forward at which the middle plan exceeds the budget most."""
        simulator = self.simulator
        batch = simulator.run(plans[:, [plans.shape[1] // 2]])
        steps = batch.live[0, batch.step_slots[0]]
        live = simulator.forward.live(simulator.forward.lifetimes(batch.used, batch.recomputed))[0]
        most, apart = self.options.moments_a_round, self.options.moment_distance
        limit = int(budget_bytes * self.options.moment_excess)
        return _highest(steps, limit, backward, most, apart), _highest(live, limit, forward, most, apart)

    @cached_property
    def _moments(self) -> Moments:
        return Moments(self.simulator)


def _distinct(*plans: Bools) -> tuple[Bools, ...]:
    """The different columns of masks, each [values, plans], in order."""
    return tuple({mask.tobytes(): mask for rounded in plans for mask in rounded.T}.values())


def _highest(live: Ints, limit: int, known: Collection[int], most: int, apart: int) -> list[int]:
    """At most `most` new places above the limit, the highest first, each at least `apart` places from the others."""
    found: list[int] = []
    for place in np.argsort(-live, kind="stable").tolist():
        if live[place] <= limit or len(found) == most:
            break
        if place not in known and all(abs(place - other) >= apart for other in found):
            found.append(place)
    return found
