"""Chooses the plan of a graph in rounds: each round lowers and reads one plan, and the next plan uses the facts of that one.

A plan that keeps its budget is taken at once.  A plan that exceeds the budget is planned again on the facts of its own graphs, and
after `FACTUAL` such plans for fewer bytes.  If the lowest plan is asked for, or no plan fits, rounds follow as long as the next
plan promises to be lower than the lowest observed plan.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compile_remat.compilation.feedback import bytes_to_plan_for, check_floor, is_lowest, is_too_large, with_run
from compile_remat.compilation.readings import PlanRefused
from compile_remat.compilation.region_run import RegionRun
from compile_remat.errors import BudgetError
from compile_remat.pages.figures import PictureSource
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.passes import Assumptions, Plan, Status
from compile_remat.passes.memory.observed_plans import assumptions_after, largest_at_peak
from compile_remat.passes.pictures.plan_pictures import PlanPictures
from compile_remat.planning.request import LOWEST, Fit, FitBelow, SharedOption
from compile_remat.planning.searches import Searches
from compile_remat.report import Report

LOG = logging.getLogger("compile_remat")

FACTUAL = 3
"""Number of plans that are lowered for one budget before the next plan is made for fewer bytes."""

TIGHTENED = 2
"""Largest number of plans for fewer bytes."""

LOWERED_FOR_LOWEST = 6
"""Largest number of plans that are lowered if the lowest plan is asked for, or if no plan fits."""

SAME = 0.001
"""Relative difference up to which the peak of a plan's code counts as the peak observed of its lowered graphs."""

AS_PROMISED = 0.005
"""A plan whose observed peak is above its planned peak by at most this share is as low as the planner can make it, and a plan that
lowers the observed peak by less is not worth a round."""


@dataclass(frozen=True)
class Seen:
    """A plan that was lowered.

    Attributes:
        partitioner: Makes the plan again.
        report: Report of the plan, with the observed peak.
    """

    partitioner: RematPartitioner
    report: Report

    @property
    def peak_bytes(self) -> int:
        """The observed peak."""
        assert self.report.observed_peak_bytes is not None
        return self.report.observed_peak_bytes


class Rounds:
    """The plans of one graph, one after the other.

    Args:
        partitioner: Partitioner of the first plan.
        is_settled: True if the first plan is taken at any peak, as an earlier process has found it.

    Attributes:
        partitioner: Partitioner of the next plan.
        seen: The plans that were lowered, in order; empty again once `_check` starts the rounds for `min`.
        is_settled: True if the next plan is taken at any peak.
        searches: The searches that all rounds share.
    """

    def __init__(self, partitioner: RematPartitioner, *, is_settled: bool = False) -> None:
        self.searches = Searches()
        self.partitioner, self.is_settled = replace(partitioner, searches=self.searches), is_settled
        self.seen: list[Seen] = []
        self._first, self._before = self.partitioner, list[Seen]()
        self._is_for_lowest = partitioner.settings.budget.kind == "min"
        self._error: BudgetError | None = None  # the planner's error, or the error that is raised in the end
        self._num_tightened = 0

    # -- judgement of a plan ------------------------------------------------------------------------------------------

    def judge(self, reports: Sequence[Report], run: RegionRun) -> None:
        """Judge a lowered plan by the dry run of its graphs; return if the plan is taken.

        Raises:
            PlanRefused: The plan is not taken; `partitioner` makes the next plan.
        """
        if len(reports) != 1 or reports[0].plan is None:
            return
        report = with_run(
            replace(reports[0], observed_peak_bytes=run.peak_bytes, plan=_with_largest(reports[0], run)), run
        )
        self.seen.append(Seen(self.partitioner, report))
        LOG.debug("%s: planned %s bytes, observed %s", report.graph_key, reports[0].plan.peak_bytes, run.peak_bytes)
        if self.is_settled or reports[0].plan.status in (Status.REPLAYED, Status.FALLBACK):
            return
        if self._is_for_lowest:
            self._judge_lowest(report, run)
        elif is_too_large(report, self.partitioner.settings):
            self._judge_large(report, run)

    def judge_code(self, reports: Sequence[Report]) -> None:
        """Judge a plan by its emitted code, as its graphs were not read if torch's cache had them; return if the plan is taken.

        Raises:
            PlanRefused: The code needs too much, and its graphs were not observed to need as much.
        """
        if len(reports) != 1 or self._is_as_seen(reports[0]) or self.is_settled:
            return
        settings, request = self.partitioner.settings, self.partitioner.request
        tightened_bytes = bytes_to_plan_for(reports, settings, request)
        if tightened_bytes is not None and self._num_tightened < TIGHTENED:
            self._num_tightened += 1
            self.partitioner = replace(self.partitioner, request=FitBelow(tightened_bytes))
            raise PlanRefused

    def _is_as_seen(self, report: Report) -> bool:
        """Returns whether a plan was read and its code has the observed peak; logs a difference, which is a defect of ours."""
        if not self.seen or self.seen[-1].partitioner != self.partitioner or report.scheduled_peak_bytes is None:
            return False
        observed_bytes, emitted_bytes = self.seen[-1].peak_bytes, report.scheduled_peak_bytes
        is_same = abs(emitted_bytes - observed_bytes) <= SAME * observed_bytes
        if not is_same:
            LOG.warning(
                "graph %s: predicted peak %d bytes, but its code needs %d. Please report this",
                report.graph_key,
                observed_bytes,
                emitted_bytes,
            )
        return is_same

    def _judge_lowest(self, report: Report, run: RegionRun) -> None:
        """Plan again if the observed facts promise a lower plan; otherwise take this plan, or go back to the lowest plan."""
        settings, before = self.partitioner.settings, self.partitioner
        if settings.budget.kind != "min" and not is_too_large(report, settings):
            return
        assert report.plan is not None
        is_above = run.peak_bytes > report.plan.peak_bytes * (1 + AS_PROMISED)
        is_new = len(self.seen) < LOWERED_FOR_LOWEST and self._assume(report, run)
        if is_new and (is_above or self._spares(before.assumed)) and self._promises_less(report):
            raise PlanRefused
        self.partitioner, lowest = before, self._lowest()
        if lowest.report is not report:
            self._settle(lowest)
        self._check(lowest)

    def _spares(self, before: Assumptions) -> bool:
        """Returns whether a new assumption says that a value is not written to memory."""
        now = self.partitioner.assumed
        added = {*now.stored, *now.stored_again} - {*before.stored, *before.stored_again}
        return not all(is_stored for _, is_stored in added)

    def _promises_less(self, report: Report) -> bool:
        """Returns whether the planner now finds a plan that was not lowered yet and is clearly below the lowest observed plan."""
        assert report.plan is not None and isinstance(report.plan.pictures, PlanPictures)
        problem = report.plan.pictures.problem.with_facts(self.partitioner.assumed)
        planner = self.searches.planner(problem, self.partitioner.settings.time_limit)
        plan, seen_bytes = planner.lowest(), min(each.peak_bytes for each in self.seen)
        known = [each.report.plan for each in self.seen if each.report.plan is not None]
        if any((plan.saved, plan.again, plan.written) == (each.saved, each.again, each.written) for each in known):
            return False
        fits = report.budget_bytes is not None and plan.peak_bytes <= report.budget_bytes < seen_bytes
        return fits or plan.peak_bytes < seen_bytes * (1 - AS_PROMISED)

    def _judge_large(self, report: Report, run: RegionRun) -> None:
        """Plan again after a plan that is too large: first on the observed facts, in the end for fewer bytes."""
        settings, request, before = self.partitioner.settings, self.partitioner.request, self.partitioner
        if is_lowest(report) and isinstance(request, Fit | FitBelow):
            self._is_for_lowest = True
            self._judge_lowest(report, run)
            return
        if len(self.seen) < FACTUAL and isinstance(request, Fit | SharedOption) and self._assume(report, run):
            raise PlanRefused
        tightened_bytes = bytes_to_plan_for([report], settings, request)
        if tightened_bytes is None or self._num_tightened == TIGHTENED:
            self.partitioner = before
            return
        self._assume(report, run)
        self._num_tightened += 1
        self.partitioner = replace(self.partitioner, request=FitBelow(tightened_bytes))
        raise PlanRefused

    def _assume(self, report: Report, run: RegionRun) -> bool:
        """Have the next plan assume the facts of this plan; returns False if the facts add nothing, or if nothing was read."""
        plan, facts = report.plan, run.facts
        if plan is None or facts is None or not isinstance(plan.pictures, PlanPictures):
            return False
        before = self.partitioner.assumed
        assumed = assumptions_after(plan.pictures.problem, plan, facts, before)
        with_plan = replace(assumed, plans=(*before.plans, (plan.saved, plan.again)))
        self.partitioner = replace(self.partitioner, assumed=with_plan)
        return assumed != before

    def _lowest(self) -> Seen:
        """The lowest observed plan; of equally low plans the last one, which needs no other round."""
        return min(reversed([*self._before, *self.seen]), key=lambda seen: seen.peak_bytes)

    def _settle(self, on: Seen) -> None:
        """Go back to an observed plan.

        Raises:
            PlanRefused: Always.
            BudgetError: See `_check`.
        """
        self._check(on)
        self.partitioner, self.is_settled = on.partitioner, True
        raise PlanRefused

    def _check(self, lowest: Seen) -> None:
        """Raise if the user's budget is too low for every observed plan; before the final error, run the rounds that `min` has.

        Raises:
            PlanRefused: The rounds for `min` come next.
            BudgetError: These rounds have run, and the error names the floor that they observed.
        """
        try:
            check_floor(lowest.report, self.partitioner.settings, self._error)
        except BudgetError as error:
            self._error = error
            if self._before or self.seen[0].partitioner.request == LOWEST:
                raise
        else:
            return
        # The assumptions so far depend on the budget.  The floor must not: a budget that equals the floor has to be kept.
        self._before, self.seen, self._is_for_lowest = self.seen, [], True
        self.partitioner = replace(self._first, request=LOWEST)
        raise PlanRefused

    def concluded(self, report: Report) -> Report:
        """The report of the taken plan, with its observed peak, the number of rounds and, for the lowest plan, the floor."""
        seen = next((s for s in reversed([*self._before, *self.seen]) if s.partitioner == self.partitioner), None)
        if seen is None:
            return report
        peak_bytes = seen.peak_bytes
        floor_bytes = peak_bytes if self._is_for_lowest else report.floor_bytes
        plan = report.plan
        if plan is not None and seen.report.plan is not None:
            plan = replace(
                plan, largest=seen.report.plan.largest, pictures=_with_facts_of(seen.report.plan, plan.pictures)
            )
        rounds = len(self._before) + len(self.seen)
        return replace(report, observed_peak_bytes=peak_bytes, rounds=rounds, floor_bytes=floor_bytes, plan=plan)

    # -- if no plan fits ----------------------------------------------------------------------------------------------

    def failed(self, error: BudgetError) -> None:
        """Continue with the lowest plan after the planner found no plan that fits: the lowest plan may still fit once lowered.

        Raises:
            BudgetError: The given error, if nothing is left to try.
        """
        is_repeated = self._error is not None or type(error) is not BudgetError
        if is_repeated or not isinstance(self.partitioner.request, Fit | SharedOption):
            raise error
        self._error, self._is_for_lowest = error, True
        self.partitioner = replace(self.partitioner, request=LOWEST)


def _with_largest(report: Report, run: RegionRun) -> Plan | None:
    """The plan with the largest tensors at the observed peak, and with all observed facts."""
    plan, facts = report.plan, run.facts
    if plan is None or facts is None or not isinstance(plan.pictures, PlanPictures):
        return plan
    largest = largest_at_peak(plan.pictures.problem, plan, facts)
    return replace(plan, largest=largest, pictures=plan.pictures.with_facts(facts))


def _with_facts_of(seen: Plan, pictures: PictureSource | None) -> PictureSource | None:
    """The pictures of a plan with the facts observed of the same plan in a round, whose pictures may lack plain torch.compile."""
    if not isinstance(pictures, PlanPictures) or not isinstance(seen.pictures, PlanPictures):
        return pictures
    return pictures if seen.pictures.facts is None else pictures.with_facts(seen.pictures.facts)
