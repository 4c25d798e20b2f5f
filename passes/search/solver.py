"""`Problem` -> `Plan`: finds and describes the fastest plan within a budget, the fastest plan of all, and the lowest plan.

All graphs take one code path.  The same problem gives the same plan in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from compile_remat.passes.memory.candidate_plan import Candidate, candidate, has_copy, narrowed
from compile_remat.passes.memory.plan_timeline import timeline_of
from compile_remat.passes.memory.simulator import Bools
from compile_remat.passes.memory.step_curve import StepCurve, curve_of
from compile_remat.passes.problem.duplication import original
from compile_remat.passes.problem.plan import Plan, Status
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.problem.validation import check
from compile_remat.passes.problem.work_budget import WorkBudget, limit_seconds, units_of
from compile_remat.passes.search.min_peak import MinimumPeak
from compile_remat.passes.search.offload.choice import Offload
from compile_remat.passes.search.offload.link import Link
from compile_remat.passes.search.options import DEFAULT, SearchOptions
from compile_remat.passes.search.pareto_archive import ParetoArchive
from compile_remat.passes.search.recursive import Recursion
from compile_remat.passes.search.strategy import Search

BYTES_PER_NS = 1000
"""A price of recomputation that knows no times: values of all kernels cost what they take in memory."""


def solve(problem: Problem, budget_bytes: int) -> Plan:
    """The fastest plan found whose predicted peak is at most `budget_bytes`; else the lowest plan, with status OVER_BUDGET."""
    return Planner(problem).within(budget_bytes)


class Planner:
    """Plans of one problem; results that several budgets share are computed once.

    Args:
        work_seconds: Limit of one search, in seconds of work of a small server's core (see `work_budget`); at the limit, the search
            ends with the best plan so far.  None for a limit by the problem's size.  The lowest peak is a search of its own.
        is_over: Returns True to stop at once, before the limit; see `WorkBudget`.
        options: Options of the search.
        archive: Keeps the best of all plans tried; None to keep none.
        link: The way to host memory, for plans within a budget; None to move nothing.

    Raises:
        ValueError: The problem is empty or cyclic, see `validation.check`.

    Attributes:
        offload: Chooses what moves to host memory; None without a link.
        ends: Causes that ended any of the searches early, as in `WorkBudget`; planners made by `on` share this set.
    """

    def __init__(
        self,
        problem: Problem,
        work_seconds: float | None = None,
        is_over: Callable[[], bool] | None = None,
        options: SearchOptions = DEFAULT,
        archive: ParetoArchive | None = None,
        link: Link | None = None,
    ) -> None:
        check(problem)
        self.problem, self.work_seconds, self.options, self.link = problem, work_seconds, options, link
        nodes = len(problem.values) + len(problem.steps)
        self.work = WorkBudget(units_of(limit_seconds(nodes, work_seconds)), is_over)
        self.search = search = Search(problem, self.work, options, archive)
        self.minimum_peak = MinimumPeak(search)
        self._found: dict[tuple[int | None, bool], Plan] = {}
        self._moving: dict[int | None, Plan] = {}
        self.offload = None if link is None else Offload(self, link)
        self.simulator, self.pinned, self.fastest_time_ns = search.simulator, search.pinned, search.fastest_time_ns

    @property
    def ends(self) -> set[str]:
        return self.work.ends

    def on(self, problem: Problem) -> Planner:
        """Returns a planner of another problem under the same limits; this planner if `problem` is the same object."""
        if problem is self.problem:
            return self
        return self._twin(problem, None)

    def recording(self, archive: ParetoArchive) -> Planner:
        """Returns a planner of the same problem under the same limits whose tried plans go to `archive`."""
        return self._twin(self.problem, archive)

    def _twin(self, problem: Problem, archive: ParetoArchive | None) -> Planner:
        other = Planner(problem, self.work_seconds, self.work.is_over, self.options, archive, self.link)
        other.work.ends = self.work.ends
        return other

    # -- what a caller asks -------------------------------------------------------------------------------------------

    def fastest(self) -> Plan:
        """The fastest plan of any size; exact, by the cut at price 0."""
        return self.plan_of(self._fastest, None)

    def no_worse_than_torch(self) -> Plan:
        """The fastest plan whose peak, saved bytes and traffic of saving do not exceed those of torch's own choice (`max`)."""
        torch_mask = self.search.mask(self.problem.reference) | self.pinned
        candidates = np.stack([torch_mask, *self.search.levels], axis=1)
        batch = self.simulator.run(candidates)
        moved, written_ns = batch.saved_bytes, self.simulator.save_time_ns @ batch.used
        fits = (batch.peak <= batch.peak[0]) & (moved <= moved[0]) & (written_ns <= written_ns[0])
        order = np.lexsort((np.arange(len(fits)), batch.time_ns))
        best = next(int(k) for k in order if fits[k])
        if batch.time_ns[0] - batch.time_ns[best] < self.options.trusted_gain * self.problem.step_time_ns:
            best = 0  # torch's own choice stands
        return self.plan_of(candidates[:, best], None)

    def torch_default(self, budget_bytes: int | None) -> Plan:
        """The plan that saves the problem's `reference` and the values that must be saved, at any peak."""
        return self.plan_of(self.search.mask(self.problem.reference) | self.pinned, budget_bytes)

    def within(self, budget_bytes: int, *, once: bool = False) -> Plan:
        """The fastest plan found within the budget, else the plan of lowest peak with status OVER_BUDGET.

        Args:
            once: True to allow one recomputation of each value at most.  Such plans are tried first in any case, because other
                plans take more time.
        """
        if self.search.peak(self._fastest) <= budget_bytes:
            return self.plan_of(self._fastest, budget_bytes)
        kept = self.kept_within(budget_bytes, once=once)
        if self.offload is None or once:
            return kept
        if budget_bytes not in self._moving:
            moving = self.offload.fastest(budget_bytes, kept)
            if not moving.is_feasible:
                moving = replace(self.lowest(), budget_bytes=budget_bytes, status=Status.OVER_BUDGET)
            self._moving[budget_bytes] = moving
        return self._moving[budget_bytes]

    def kept_within(self, budget_bytes: int, *, once: bool = False) -> Plan:
        """As `within`, among the plans that move nothing to the host."""
        if (budget_bytes, once) not in self._found:
            with self.work.search():
                found = self._within(budget_bytes, once=once)
                self._found[budget_bytes, once] = found if once else self._near_known(found, budget_bytes)
        return self._found[budget_bytes, once]

    def _within(self, budget_bytes: int, *, once: bool) -> Plan:
        found = self.saved_within(budget_bytes)
        if found is not None:
            return self.plan_of(found, budget_bytes)
        low = self._low(budget_bytes, once=once)
        best = [c for c in low if c.peak_bytes <= budget_bytes]
        return self._plan_of(
            min(best, key=lambda c: c.time_ns) if best else min(low, key=lambda c: c.peak_bytes), budget_bytes
        )

    def saved_within(self, budget_bytes: int) -> Bools | None:
        """Mask of the values that the fastest plan found within the budget saves; None if only the lowest plans may fit."""
        fastest = self.saved_at_once(budget_bytes)
        if fastest is None:
            return None
        return self.search.settled(self.search.improved(fastest, budget_bytes), budget_bytes)

    def saved_at_once(self, budget_bytes: int) -> Bools | None:
        """As `saved_within`, by the first part of its search, which knows no bound."""
        is_in_reach = budget_bytes >= self.search.least_peak_bytes
        masks = self.search.candidates(budget_bytes) if is_in_reach else []
        feasible = [m for m in masks if self.search.peak(m) <= budget_bytes]
        return min(feasible, key=self.search.time, default=None)

    def _near_known(self, found: Plan, budget_bytes: int) -> Plan:
        """The fastest fitting plan of a local search from the observed plans, if faster than `found` or if that is OVER_BUDGET."""
        near = [self._recursion.improved(each, budget_bytes) for each in self._known]
        fitting = [each for each in near if each.peak_bytes <= budget_bytes]
        best = min(fitting, key=lambda each: each.time_ns, default=None)
        if best is None:
            return found
        plan = self._plan_of(best, budget_bytes)
        is_faster = plan.extra_time_ns < found.extra_time_ns
        return plan if is_faster or found.status is Status.OVER_BUDGET else found

    @property
    def simulations(self) -> int:
        """Number of plans tried so far."""
        recursion: Recursion | None = vars(self).get("_recursion")  # it is built when it is first needed
        return self.search.simulations + (0 if recursion is None else recursion.simulations)

    def curve(self, saved: Bools) -> StepCurve:
        """The step along time of the plan that saves the values in a mask, and computes no value three times."""
        return curve_of(self._once(saved))

    def _low(self, budget_bytes: int, *, once: bool) -> list[Candidate]:
        """Plans of nearly the lowest peak, at least one."""
        found: list[Candidate] = []
        recursive = self._lowest_recursive if self.options.uses_recursion and not once else None
        if recursive is not None:
            fits = recursive.peak_bytes <= budget_bytes
            found.append((self._recursion.within(budget_bytes) if fits else None) or recursive)
            if fits and self.search.peak(self.minimum_peak.first) > budget_bytes:
                return found
        fitting = [m for m in [self.minimum_peak.first] if self.search.peak(m) <= budget_bytes]
        fitting = fitting or [m for m in self.minimum_peak.found if self.search.peak(m) <= budget_bytes]
        if not fitting:
            low = self._lowest_once_found if once else self._lowest_found
            if low.peak_bytes > budget_bytes:
                low = self._lowest_once if once else self._lowest
            return [*found, low]
        lowest = min(fitting, key=self.search.time)
        improved = self.search.from_below(lowest, budget_bytes)
        return [*found, self._once(self.search.settled(improved, budget_bytes))]

    def lowest(self, *, once: bool = False) -> Plan:
        """The plan of lowest peak found (`min`); `once` as in `within`."""
        kept = self.lowest_kept(once=once)
        if self.offload is None or once:
            return kept
        if None not in self._moving:
            self._moving[None] = self.offload.lowest(kept)
        return self._moving[None]

    def lowest_kept(self, *, once: bool = False) -> Plan:
        """As `lowest`, among the plans that move nothing to the host."""
        if (None, once) not in self._found:
            best = self._lowest_once if once else self._lowest
            self._found[None, once] = self._plan_of(best, None)
        return self._found[None, once]

    def low(self) -> tuple[str, ...]:
        """Names of the values saved by a quickly found plan of low peak; `lowest` searches longer."""
        return tuple(self.problem.values[v].name for v in np.flatnonzero(self.minimum_peak.first))

    def plan_of(
        self,
        mask: Bools,
        budget_bytes: int | None,
        again: Sequence[str] = (),
        anchors: Sequence[int] = (),
        bound_ns: int | None = None,
    ) -> Plan:
        """Describes the plan that saves the values in `mask` and computes the values in `again` twice in the backward.

        Args:
            anchors: Budgets at which the plan's lower bound may be computed, see `LpBound.least_time_ns`.
            bound_ns: The plan's lower bound, if the caller knows it.
        """
        if again:
            return self._plan_of(candidate(self.problem, mask, again, self.work), budget_bytes, bound_ns=bound_ns)
        return self._plan_of(self._once(mask), budget_bytes, anchors, bound_ns)

    def _once(self, mask: Bools) -> Candidate:
        return Candidate(mask, (), self.simulator, self.simulator.one(mask))

    def _plan_of(
        self,
        found: Candidate,
        budget_bytes: int | None,
        anchors: Sequence[int] = (),
        bound_ns: int | None = None,
    ) -> Plan:
        simulator, batch = found.simulator, found.batch
        names = [original(v.name, found.again) for v in simulator.problem.values]
        seen = timeline_of(simulator, found.saved)
        extra = int(batch.time_ns[0]) - self.fastest_time_ns
        recompute_time_ns = int(simulator.time_ns @ batch.recomputed[:, 0])
        limit_bytes = seen.peak_bytes if budget_bytes is None else budget_bytes
        bound = bound_ns
        if bound is None:
            bound = self.search.bound(limit_bytes, extra, once=not found.again, anchors=anchors)
        if budget_bytes is not None and seen.peak_bytes > budget_bytes:
            status = Status.OVER_BUDGET
        else:
            status = Status.OPTIMAL if extra <= bound else Status.FEASIBLE
        return Plan(
            problem_key=self.problem.key(),
            status=status,
            budget_bytes=budget_bytes,
            saved=tuple(names[v] for v in np.flatnonzero(batch.used[:, 0])),
            recomputed=tuple(dict.fromkeys(names[v] for v in np.flatnonzero(batch.recomputed[:, 0]))),
            again=found.again,
            written=self.problem.written,
            peak_bytes=seen.peak_bytes,
            forward_peak_bytes=seen.forward_peak_bytes,
            saved_bytes=int(batch.saved_bytes[0]),
            output_bytes=simulator.output_bytes,
            input_copy_bytes=int(simulator.input_copy_bytes(batch.recomputed)[0]),
            once_time_ns=self.problem.step_time_ns,
            recompute_time_ns=recompute_time_ns,
            saving_time_ns=int(batch.time_ns[0]) - recompute_time_ns,
            extra_time_ns=extra,
            bound_time_ns=bound,
            least_peak_bytes=self.search.least_peak_bytes,
            largest=seen.largest,
            simulations=self.search.simulations + (self._recursion.simulations if found.again else 0),
        )

    def mask_of(self, names: Iterable[str]) -> Bools:
        """Mask of the named values and of the pinned ones, for plans from a file; KeyError names a value that cannot be saved."""
        index = {v.name: i for i, v in enumerate(self.problem.values) if v.is_saveable}
        return self.search.mask([index[name] for name in names]) | self.pinned

    @property
    def _fastest(self) -> Bools:
        return self.search.mask(self.search.hull[0].saved) | self.pinned

    @cached_property
    def _recursion(self) -> Recursion:
        """Plans that recompute some values more than once."""
        return Recursion(self.simulator, self.search.levels[-1], self.pinned, self.search.searcher.weight, self.options)

    @cached_property
    def _lowest_once(self) -> Candidate:
        """The plan of lowest peak among those that compute no value twice."""
        return self._settled(self._lowest_once_found)

    @cached_property
    def _lowest_once_found(self) -> Candidate:
        """As `_lowest_once`, before a search's last moves."""
        return self._once(self.minimum_peak.found[0])

    @cached_property
    def _lowest(self) -> Candidate:
        """The plan of lowest peak, recursive or not."""
        return self._settled(self._lowest_found)

    @cached_property
    def _lowest_found(self) -> Candidate:
        """As `_lowest`, before a search's last moves; from two searches: one with the problem's times, one with prices of bytes.

        The second one is spared where no plan is much lower, and after a recursive plan: the cuts at which that computes values
        anew lie where few bytes are live, whatever times say, and prices of bytes found none clearly lower in 12 problems of 12.
        """
        by_time = self._low_by_time
        if by_time.again or self.search.is_lowest(by_time.peak_bytes):
            return by_time
        by_bytes = self._low_by_bytes
        is_lower = by_bytes.peak_bytes < by_time.peak_bytes * self.options.same_peak
        return by_bytes if is_lower else by_time

    @cached_property
    def _low_by_bytes(self) -> Candidate:
        """The lowest plan that is found if recomputing a value costs as much as the value's bytes.

        A search for the lowest peak follows times where peaks do not tell it what to save, and gets stuck where these lead.
        """
        values = tuple(replace(v, time_ns=v.nbytes // BYTES_PER_NS, save_time_ns=0) for v in self.problem.values)
        low = self._twin(replace(self.problem, values=values), None)._low_by_time
        saved = narrowed(low.saved, has_copy(self.problem, low.again))
        return candidate(self.problem, saved, low.again, self.work) if low.again else self._once(saved)

    @cached_property
    def _low_by_time(self) -> Candidate:
        """The lowest plan that is found with the problem's times; local search replaces a plan only if the peak falls clearly."""
        recursive = self._lowest_recursive if self.options.uses_recursion else None
        found = self._once(self.minimum_peak.found[0]) if recursive is None else recursive
        with self.work.search():
            pressed = min(map(self._pressed, [found, *self._known]), key=lambda each: each.peak_bytes)
            if pressed.again and self.options.uses_perturbation and not self.search.is_lowest(pressed.peak_bytes):
                pressed = self._recursion.shaken(pressed)
        return pressed if pressed.peak_bytes < found.peak_bytes * self.options.same_peak else found

    def _settled(self, lowest: Candidate) -> Candidate:
        """The fastest plan of nearly the lowest peak after a search's last moves; plans that compute values twice stay as they are.

        A few bytes less are not worth a slow plan: the lowest plan of a sliced head, by 4 bytes of 436,488, ran all slices twice.
        """
        if lowest.again:
            return lowest
        mask, lowest_bytes = lowest.saved, min(lowest.peak_bytes, *map(self.search.peak, self.minimum_peak.found))
        limit_bytes = max(lowest.peak_bytes, int(lowest_bytes / self.options.same_peak))
        with self.work.search():
            mask = self.search.faster(mask, self.search.best_level(limit_bytes), limit_bytes)
            faster = self.search.faster(mask, self.search.finish(mask, limit_bytes), limit_bytes)
            return self._once(self.search.settled(faster, limit_bytes, self.options.operand_cells))

    @cached_property
    def _known(self) -> list[Candidate]:
        """The observed plans of the problem, simulated."""
        names = {value.name for value in self.problem.values if value.is_saveable}
        return [
            candidate(self.problem, self.mask_of(saved), again, self.work)
            for saved, again in self.problem.plans
            if names.issuperset(saved)
        ]

    def _pressed(self, found: Candidate) -> Candidate:
        """The plan after local search for fractions of its own peak, while the peak falls; the values computed twice stay."""
        for share in self.options.pressed_targets:
            while not (self.work.is_spent or self.search.is_lowest(found.peak_bytes)):
                lower = self._recursion.improved(found, int(share * found.peak_bytes))
                if lower.peak_bytes >= found.peak_bytes:
                    break
                found = lower
        return found

    @cached_property
    def _lowest_recursive(self) -> Candidate | None:
        """The recursive plan of lowest peak, if its peak is clearly below that of all plans without recursion; else None."""
        peak, pressed = self.search.peak, self.minimum_peak.first
        if self.search.is_lowest(peak(pressed)):
            return None
        with self.work.search():
            found = self._recursion.lowest(
                self.minimum_peak.unavoidable_bytes, int(peak(pressed) * self.options.same_peak)
            )
        if found is None or found.peak_bytes <= self.options.recursive_lead * peak(pressed):
            return found
        lowest = min(peak(m) for m in self.minimum_peak.found)
        least_gain = self.options.recursive_targets[0]
        return found if found.peak_bytes <= int(lowest * self.options.same_peak) * least_gain else None
