"""A lower bound on time from all bytes live at a few moments: the moments at which a rounded solution needs too much memory.

First, the programme of the begin of the backward is solved, its answer rounded to a plan, and the plan simulated.  Where the plan
exceeds the budget most, in forward and backward, moments are added (`moments`), and the programme is solved again: a cutting-plane
method.  The rounded answers are also starts for the search, because they weigh all these moments together.

If a plan has few values to decide on (`SearchOptions.branch_values`), HiGHS makes the programme's answers integral by branch and
bound, and moments are added where the plan of such an answer exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from compile_remat.passes.memory.simulator import Bools, Floats, Ints, Simulator
from compile_remat.passes.search.bounds.lp_bound import at_the_begin
from compile_remat.passes.search.bounds.moments import Moments
from compile_remat.passes.search.bounds.programme import Programme
from compile_remat.passes.search.options import DEFAULT, SearchOptions


@dataclass(frozen=True)
class Proof:
    """The result of the programme at one budget.

    Attributes:
        least_time_ns: No plan that recomputes each value at most once is faster.  After a branch and bound, this time is as exact
            as the solver's arithmetic.
        starts: Masks of saved values, [values], from the programme's rounded or integral answers.
    """

    least_time_ns: int
    starts: tuple[Bools, ...]


class MomentBound:
    """Bounds of one problem."""

    def __init__(self, simulator: Simulator, pinned: Bools, options: SearchOptions = DEFAULT) -> None:
        self.simulator, self.pinned, self.options = simulator, pinned, options
        self._proofs: dict[int, Proof] = {}

    def proof(self, budget_bytes: int) -> Proof:
        """The proof at a budget, computed once for each budget."""
        if budget_bytes not in self._proofs:
            self._proofs[budget_bytes] = self._worked_out(budget_bytes)
        return self._proofs[budget_bytes]

    @cached_property
    def branches(self) -> bool:
        """True if so few values are left to decide on that a branch and bound is affordable."""
        return int((self.simulator.is_saveable & ~self.pinned).sum()) <= self.options.branch_values

    def knows(self, budget_bytes: int) -> bool:
        """Returns whether the proof at this budget is computed already."""
        return budget_bytes in self._proofs

    def _worked_out(self, budget_bytes: int) -> Proof:
        programme = self._programme()
        backward, forward = set[int](), set[int]()
        least_ns, starts = 0, dict[bytes, Bools]()
        for turn in range(self.options.moment_rounds + 1):
            self.simulator.work.charge(programme.num_entries)
            solution = programme.solve(budget_bytes)
            if solution.values is None:
                break
            before_ns, proven_ns = least_ns, programme.proven_ns(solution.multipliers, budget_bytes)
            least_ns = max(before_ns, proven_ns)
            rounded = self._saving(solution.values, self.options.rounding_levels)
            starts |= {mask.tobytes(): mask for mask in rounded.T}
            steps, places = self._exceeding(rounded, budget_bytes, backward, forward)
            if turn == self.options.moment_rounds or not (steps or places):
                break
            if turn and least_ns - before_ns < self._worth_ns:
                break
            self._add(programme, steps, places)
            backward.update(steps)
            forward.update(places)
        for _ in range(self.options.branch_rounds if self.branches else 0):
            proven_ns, answer = programme.branch(budget_bytes, self.options.branch_nodes, self.options.branch_seconds)
            least_ns = max(least_ns, proven_ns)
            if answer is None:
                break
            whole = self._saving(answer, [0.5])
            starts[whole.tobytes()] = whole[:, 0]
            steps, places = self._exceeding(whole, budget_bytes, backward, forward)
            if not (steps or places):
                break
            self._add(programme, steps, places)
            backward.update(steps)
            forward.update(places)
        return Proof(least_ns, tuple(starts.values()))

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
        programme, begin = Programme(self.simulator), at_the_begin(self.simulator)
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


def _highest(live: Ints, limit: int, known: Collection[int], most: int, apart: int) -> list[int]:
    """At most `most` new places above the limit, the highest first, each at least `apart` places from the others."""
    found: list[int] = []
    for place in np.argsort(-live, kind="stable").tolist():
        if live[place] <= limit or len(found) == most:
            break
        if place not in known and all(abs(place - other) >= apart for other in found):
            found.append(place)
    return found
