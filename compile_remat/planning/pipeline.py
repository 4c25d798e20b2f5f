"""The pipeline from a joint graph to a plan: one loop over the graph's variants, and one policy for when the next one is tried.

Everything that plans a joint graph calls `plan_graph`: the backend, `explain` and `plan`, graphs with gradients inside, and
forecasts for devices that are absent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from compile_remat._torch.sizes import symbols_of
from compile_remat._util.user_warnings import Said, held_warnings, warn_user
from compile_remat.errors import BudgetError, PlanMismatchError, warn
from compile_remat.passes import Status
from compile_remat.passes.graph.slices.largest import NotSliced
from compile_remat.planning.joint_planning import Planned, plan_joint
from compile_remat.planning.joint_problem import JointModule, PlanContext, PreparedGraph, prepare
from compile_remat.planning.plan_store import DELETE, PinnedInSlices, PinnedPlan, store_plan
from compile_remat.planning.request import Fit, FitBelow, Request, Resume, SharedOption, interrupted_by
from compile_remat.planning.settings import SLICES, Settings
from compile_remat.planning.variants import NUMBERS, Candidate, Variant, Variants, best_of, is_slower, reasons_of
from compile_remat.report import joined

SHARED = "rows are not computed in slices: the graph shares its budget with others of the step"
"""Message for a graph that is not sliced because it shares its budget."""

INNER = "rows are not computed in slices: the graph computes its gradients itself"
"""Message for a graph that is not sliced because its backward is inside of it."""

FOR_NOTHING = 0.01
"""A plan costs nothing if its extra time is at most this share of the step: slices are not tried then."""

OFF, AUTO = SLICES["off"], SLICES["auto"]

Outcome = Planned | BudgetError
"""A plan of one variant, or the error if none keeps the budget."""


def plan_graph(
    graph: JointModule,
    settings: Settings,
    request: Request,
    context: PlanContext | None = None,
    prepared: PreparedGraph | None = None,
) -> Planned | None:
    """Plan a joint graph, with rows in slices if the settings ask for them and the budget needs them.

    There are no slices under `max`, in a graph that shares its budget with others, and in one that computes its gradients itself.

    Args:
        graph: Rewritten in place.
        prepared: The whole graph, prepared under the same settings, request and context, if they ask for no slices: then `graph`
            is not read.

    Returns:
        The plan, with the rewritten graph that it is for; None if nothing depends on a tangent, so that there is nothing to choose.

    Raises:
        BudgetError: No plan fits the budget, in any variant.
        ConfigError: Torch's annotations of a memory budget contradict each other.
        PlanMismatchError: The plan in `plan_dir` for this graph's key does not fit the graph.
    """
    return _Pipeline(graph, settings, request, context or PlanContext(), prepared).run()


@dataclass(frozen=True)
class _Attempt:
    """A variant that was planned.

    Attributes:
        said: Warnings of its planning, which the user hears only if the variant is taken.
    """

    variant: Variant
    outcome: Outcome
    said: tuple[Said, ...]


def _is_at_once(variant: Variant) -> bool:
    """Returns whether no product of a variant runs again in the backward."""
    return all(product.at_once for product in variant.products)


class _Pipeline:
    """The planning of one joint graph; see `plan_graph`."""

    def __init__(
        self,
        graph: JointModule,
        settings: Settings,
        request: Request,
        context: PlanContext,
        prepared: PreparedGraph | None = None,
    ) -> None:
        self.settings, self.request, self.context = settings, request, context
        self.asked = interrupted_by(request)
        is_alone = isinstance(self.asked, Fit | FitBelow) and not context.is_inner
        self.slices = settings.slices if is_alone else OFF
        self.variants = Variants(graph, self.slices, is_on_cpu=context.device is not None)
        self.whole = prepared

    def run(self) -> Planned | None:
        start = time.perf_counter()
        self.whole = self.whole or prepare(self.variants.whole.graph, self.settings, self.request, self.context)
        if self.whole is None:
            return None
        planned = self._taken()
        return replace(planned, report=replace(planned.report, planning_time_s=time.perf_counter() - start))

    def _taken(self) -> Planned:
        try:
            if isinstance(self.request, Resume):
                sliced = self.request.incumbent.plan.sliced
                return self._planned(self.variants.with_products(sliced) if sliced else self.variants.whole)
            planned = self._alone() if self.slices == OFF else self._best()
        except PinnedInSlices as found:
            if self.slices == OFF:
                raise
            return self._replayed(found)
        self._store(planned)
        return planned

    def _alone(self) -> Planned:
        """Returns the plan of the whole graph; if slices were asked for, its message says why there are none."""
        planned = self._planned(self.variants.whole)
        if self.settings.slices == OFF or not (self.context.is_inner or isinstance(self.asked, SharedOption)):
            return planned
        return _saying(planned, INNER if self.context.is_inner else SHARED)

    def _planned(self, variant: Variant, pinned: PinnedPlan | None = None) -> Planned:
        """Returns the plan of one variant; sliced variants have the budget, and the readable inputs, of the whole graph."""
        whole = self.whole
        assert whole is not None
        if variant.is_whole:
            return plan_joint(whole, self.settings, self.request, self.context)
        context = replace(self.context, with_plain=False)
        prepared = prepare(
            variant.graph,
            self.settings,
            self.request,
            context,
            effective=whole.effective,
            readable=whole.joint.readable,
        )
        assert prepared is not None
        planned = plan_joint(replace(prepared, plain=whole.plain), self.settings, self.request, context, pinned)
        return _with_products(planned, variant)

    # -- the loop over the variants -----------------------------------------------------------------------------------

    def _best(self) -> Planned:
        """Returns the whole graph's plan if it keeps the budget for nothing; else the fastest plan that does, or the lowest one.

        Raises:
            BudgetError: No variant has a plan that keeps the budget; the error is that of the lowest one.
        """
        whole = self._attempt(self.variants.whole)
        if self._is_settled(whole.outcome):
            return self._checked(whole, "")
        if self.slices == AUTO and self._candidate(whole).is_met:
            tried, _ = self._tried([whole], takewhile(_is_at_once, self.variants.at_once()))
            return self._checked(tried[self._best_of(tried)], "")
        tried, left = self._tried([whole] if self.slices == AUTO else [], self.variants.sliced())
        tried = tried or [whole]  # a number of slices leaves out the whole graph, unless no rows can be in slices
        best = tried[self._best_of(tried)].variant
        numbers = (best.number,) if best.products else NUMBERS if self.slices == AUTO else (self.slices,)
        tried += self._tried([], self.variants.at_once(numbers))[0]
        chosen = tried[self._best_of(tried)]
        return self._checked(chosen, "" if self._candidate(chosen).is_met else self._why_not_sliced(tried, left))

    def _tried(
        self, attempts: list[_Attempt], variants: Iterable[Variant]
    ) -> tuple[list[_Attempt], tuple[NotSliced, ...]]:
        """Returns the attempts with those at `variants`, until there are no more rows in slices, or slower ones.

        The second result says which products the last variant leaves whole.
        """
        left = tuple[NotSliced, ...]()
        for variant in variants:
            left = variant.left
            if not variant.products:
                break
            attempts = [*attempts, self._attempt(variant)]
            if is_slower([self._candidate(attempt) for attempt in attempts]):
                break
        return attempts, left

    def _best_of(self, attempts: Sequence[_Attempt]) -> int:
        return best_of([self._candidate(attempt) for attempt in attempts])

    def _attempt(self, variant: Variant) -> _Attempt:
        with held_warnings() as said:
            try:
                outcome: Outcome = self._planned(variant)
            except BudgetError as error:
                outcome = error
        return _Attempt(variant, outcome, tuple(said))

    def _is_settled(self, whole: Outcome) -> bool:
        """Returns True if the plan of the whole graph is taken, whatever slices would bring."""
        if isinstance(whole, BudgetError):
            return False
        is_replayed = whole.plan.status is Status.REPLAYED
        is_free = whole.plan.extra_time_ns <= FOR_NOTHING * whole.plan.time_ns
        return self._budget_kind == "max" or is_replayed or (self.slices == AUTO and self._is_met(whole) and is_free)

    @property
    def _budget_kind(self) -> str:
        assert self.whole is not None
        return self.whole.effective.budget.kind

    def _is_met(self, planned: Planned) -> bool:
        """Returns True if a plan keeps the requested budget or target; always False if the lowest peak is requested."""
        if self._budget_kind == "min":
            return False
        limit = self.asked.target_bytes if isinstance(self.asked, FitBelow) else planned.plan.budget_bytes
        return limit is not None and planned.plan.peak_bytes <= limit

    def _candidate(self, attempt: _Attempt) -> Candidate:
        if isinstance(attempt.outcome, BudgetError):
            return Candidate(attempt.outcome.floor_bytes, 0, False)
        plan = attempt.outcome.plan
        return Candidate(plan.peak_bytes, plan.time_ns, self._is_met(attempt.outcome))

    def _why_not_sliced(self, tried: Sequence[_Attempt], left: Sequence[NotSliced]) -> str:
        """Returns the reason why rows are not, or not all, computed in slices; empty if they are."""
        assert self.whole is not None
        if symbols_of(self.whole.joint.module.graph):
            return "rows of dynamic sizes are not computed in slices"
        return reasons_of(left, is_whole=all(attempt.variant.is_whole for attempt in tried))

    def _checked(self, attempt: _Attempt, text: str) -> Planned:
        """Returns the plan of an attempt, with `text` in its message; its warnings are said now.

        Raises:
            BudgetError: The attempt has no plan.
        """
        if isinstance(attempt.outcome, BudgetError):
            raise attempt.outcome.with_hint(text) if text else attempt.outcome
        for text_said, category in attempt.said:
            warn_user(text_said, category)
        return _saying(attempt.outcome, text) if text else attempt.outcome

    # -- plans in files -----------------------------------------------------------------------------------------------

    def _replayed(self, found: PinnedInSlices) -> Planned:
        """Returns the plan of a file, in the graph with rows in slices for which it was made.

        Raises:
            PlanMismatchError: The graph cannot have these rows in slices, or is another one.
        """
        pinned = found.pinned
        variant = self.variants.with_products(pinned.plan.sliced)
        if variant.products != pinned.plan.sliced:
            raise PlanMismatchError(
                f"{pinned.path} has rows in slices ({pinned.plan.slices_text}) that this graph cannot have. {DELETE}"
            )
        return self._planned(variant, pinned)

    def _store(self, planned: Planned) -> None:
        """Pin a plan under the key of the whole graph, by which a later compilation looks it up."""
        assert self.whole is not None
        is_new = isinstance(self.request, Fit | FitBelow) and planned.resume is None
        if is_new and planned.plan.status is not Status.REPLAYED:
            store_plan(planned.plan, self.settings.plan_dir, self.whole.problem.key())


def _saying(planned: Planned, text: str) -> Planned:
    """Warns with `text`; returns the same plan with `text` added to its report's message."""
    warn(text)
    return replace(planned, report=replace(planned.report, message=joined(planned.report.message, text)))


def _with_products(planned: Planned, variant: Variant) -> Planned:
    """Returns the plan with the names of the products that its graph computes in slices."""
    plan, resume = replace(planned.plan, sliced=variant.products), planned.resume
    if resume is not None:
        incumbent = replace(resume.incumbent, plan=replace(resume.incumbent.plan, sliced=variant.products))
        resume = replace(resume, incumbent=incumbent)
    return replace(planned, plan=plan, report=replace(planned.report, plan=plan), resume=resume)
