"""Plans a graph with rows in slices: with 2, 4, ... slices if the budget is not met without.

Each number of slices gives another joint graph, made from torch's, which is planned like any other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from compile_remat._torch.joint_graph import ReadableInputs, copied_graph
from compile_remat._torch.sizes import symbols_of
from compile_remat.budget import MemoryBudget
from compile_remat.errors import BudgetError, PlanMismatchError, warn
from compile_remat.passes import NotSliced, SlicedGraph, Status, slice_largest, slice_products
from compile_remat.planning.joint_planning import Planned, inputs_read_by_plain, plan_joint
from compile_remat.planning.plan_store import PinnedInSlices, store_plan
from compile_remat.planning.request import Fit, FitBelow, Request, Resume, SharedOption, interrupted_by
from compile_remat.planning.settings import SLICES, Settings
from compile_remat.planning.slices.choice import NUMBERS, Candidate, best_of, is_slower, reasons_of
from compile_remat.report import joined

SHARED = "rows are not computed in slices: the graph shares its budget with others of the step"
"""Message for a graph that is not sliced because it shares its budget."""

OFF, AUTO = SLICES["off"], SLICES["auto"]


def plan_with_slices(
    joint_module: fx.GraphModule,
    settings: Settings,
    request: Request,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    **keywords: Any,
) -> Planned | None:
    """Plan a joint graph as `plan_joint` does, with rows in slices if the settings ask for them.

    There are no slices under `max`, and in a graph that shares its budget with others.

    Raises:
        BudgetError: No plan fits the budget, with any number of slices.
    """
    outputs: dict[str, Any] = {
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_indices": static_lifetime_input_indices,
    }
    given = outputs | keywords
    request_now = interrupted_by(request)
    if settings.slices == OFF or keywords.get("is_inner") or not isinstance(request_now, Fit | FitBelow):
        planned = plan_joint(joint_module, settings, request, **given)
        is_asked = settings.slices != OFF and isinstance(request_now, SharedOption)
        return _saying(planned, SHARED) if is_asked and planned is not None else planned
    search = _Search(copied_graph(joint_module), settings, request, outputs, given)
    if isinstance(request, Resume):
        return search.resumed(request)
    try:
        return search.run(joint_module)
    except PinnedInSlices as found:
        return search.replayed(found)


def _saying(planned: Planned, text: str) -> Planned:
    """Warns with `text`; returns the same plan with `text` added to its report's message."""
    warn(text)
    return replace(planned, report=replace(planned.report, message=joined(planned.report.message, text)))


@dataclass(frozen=True)
class _Search:
    """The search for the number of slices of one graph.

    Attributes:
        module: The graph as torch gave it.
        outputs: The keyword arguments that separate the graph's forward outputs from its gradients.
        keywords: All keyword arguments of `plan_joint`, `outputs` included.
    """

    module: fx.GraphModule
    settings: Settings
    request: Request
    outputs: dict[str, Any]
    keywords: dict[str, Any]

    @cached_property
    def readable(self) -> ReadableInputs | None:
        """The inputs that the backward may read; read from the graph without slices, which plain torch.compile would split."""
        return inputs_read_by_plain(copied_graph(self.module), **self.outputs)

    def resumed(self, request: Resume) -> Planned | None:
        """Returns the incumbent of a search that a deadline has ended, in the graph with the incumbent's slices."""
        graph = slice_products(copied_graph(self.module), request.incumbent.plan.sliced, **self.outputs)
        return plan_joint(graph.module, self.settings, request, **self.keywords, readable=self.readable)

    def replayed(self, found: PinnedInSlices) -> Planned:
        """Returns the plan of a file, in the graph with rows in slices for which it was made.

        Raises:
            PlanMismatchError: The graph cannot have these rows in slices, or is another one.
        """
        pinned = found.pinned
        graph = slice_products(copied_graph(self.module), pinned.plan.sliced, **self.outputs)
        if graph.products != pinned.plan.sliced:
            raise PlanMismatchError(
                f"{pinned.path} has rows in slices ({pinned.plan.slices_text}) that this graph cannot have so. "
                "Delete it to have a new plan written."
            )
        settings = self.settings
        if settings.budget.kind == "fraction" and found.budget_bytes:
            settings = replace(settings, budget=MemoryBudget("bytes", found.budget_bytes), from_auto=True)
        planned = plan_joint(
            graph.module,
            settings,
            self.request,
            **self.keywords | {"with_plain": False},
            is_stored=False,
            pinned=pinned,
            readable=self.readable,
        )
        assert planned is not None
        planned = _with_products(planned, graph)
        return replace(planned, report=replace(planned.report, budget=str(self.settings.budget), plain=found.plain))

    def run(self, joint_module: fx.GraphModule) -> Planned | None:
        """Returns the plan without slices if it keeps the budget; else the fastest sliced plan that does, or the lowest one."""
        with warnings.catch_warnings(record=True) as noted:
            whole = self._attempt(joint_module, self.settings, self.keywords)
        is_max = not isinstance(whole, BudgetError | None) and whole.report.budget == str(MemoryBudget("max"))
        is_met = self.settings.slices == AUTO and self._is_met(whole)
        is_pinned = isinstance(whole, Planned) and whole.plan.status is Status.REPLAYED
        if whole is None or is_max or is_met or is_pinned:
            self._store(whole, whole)
            _warn_again(noted)
            return _checked(whole)
        found: list[tuple[int, Planned | BudgetError]] = [(1, whole)] if self.settings.slices == AUTO else []
        left: tuple[NotSliced, ...] = ()
        for number, graph in self._graphs():
            left = graph.left
            if not graph.products:
                break
            found.append((number, self._sliced(graph, whole)))
            if is_slower([self._candidate(planned) for _, planned in found]):
                break
        planned = self._concluded(found or [(1, whole)], left, noted)
        self._store(planned, whole)
        return planned

    def _store(self, planned: Planned | BudgetError | None, whole: Planned | BudgetError | None) -> None:
        """Pin a plan under the key of the whole graph, by which a later compilation looks it up."""
        if not isinstance(planned, Planned) or planned.resume is not None or planned.plan.status is Status.REPLAYED:
            return
        assert whole is not None
        key = whole.plan.problem_key if isinstance(whole, Planned) else whole.graph_key
        store_plan(planned.plan, self.settings.plan_dir, key)

    def _graphs(self) -> Iterator[tuple[int, SlicedGraph]]:
        for number in NUMBERS if self.settings.slices == AUTO else (self.settings.slices,):
            yield number, slice_largest(copied_graph(self.module), number, **self.outputs)

    def _sliced(self, graph: SlicedGraph, whole: Planned | BudgetError) -> Planned | BudgetError:
        """Returns the plan of a sliced graph, under the same bytes as the whole graph."""
        settings = self.settings
        if isinstance(whole, Planned) and settings.budget.kind == "fraction" and whole.plan.budget_bytes:
            settings = replace(settings, budget=MemoryBudget("bytes", whole.plan.budget_bytes), from_auto=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of a plan that may not be taken
            keywords = self.keywords | {"with_plain": False, "readable": self.readable}
            planned = self._attempt(graph.module, settings, keywords)
        if not isinstance(planned, Planned):
            assert planned is not None
            return planned
        planned = _with_products(planned, graph)
        if not isinstance(whole, Planned):
            return planned
        return replace(planned, report=replace(planned.report, budget=whole.report.budget, plain=whole.report.plain))

    def _attempt(
        self, module: fx.GraphModule, settings: Settings, keywords: dict[str, Any]
    ) -> Planned | BudgetError | None:
        try:
            return plan_joint(module, settings, self.request, **keywords, is_stored=False)
        except BudgetError as error:
            return error

    def _is_met(self, planned: Planned | BudgetError | None) -> bool:
        """Returns True if a plan keeps the requested budget or target; always False if the lowest peak is requested."""
        if not isinstance(planned, Planned) or planned.report.budget == str(MemoryBudget("min")):
            return False
        request = interrupted_by(self.request)
        limit = request.target_bytes if isinstance(request, FitBelow) else planned.plan.budget_bytes
        return limit is not None and planned.plan.peak_bytes <= limit

    def _candidate(self, planned: Planned | BudgetError) -> Candidate:
        if isinstance(planned, BudgetError):
            return Candidate(planned.floor_bytes, 0, False)
        plan = planned.plan
        return Candidate(plan.peak_bytes, plan.step_time_ns + plan.extra_time_ns, self._is_met(planned))

    def _concluded(
        self,
        found: Sequence[tuple[int, Planned | BudgetError]],
        left: Sequence[NotSliced],
        noted: Sequence[warnings.WarningMessage],
    ) -> Planned:
        candidates = [self._candidate(planned) for _, planned in found]
        position = best_of(candidates)
        best = found[position][1]
        if candidates[position].is_met:
            assert isinstance(best, Planned)
            return best
        text = reasons_of(left, is_whole=all(number == 1 for number, _ in found))
        if symbols_of(self.module.graph):
            text = "rows of dynamic sizes are not computed in slices"
        if isinstance(best, BudgetError):
            raise best.with_hint(text) if text else best
        if best is found[0][1]:
            _warn_again(noted)
        return _saying(best, text) if text else best


def _with_products(planned: Planned, graph: SlicedGraph) -> Planned:
    """Returns the plan with the names of the products that its graph computes in slices."""
    plan, resume = replace(planned.plan, sliced=graph.products), planned.resume
    if resume is not None:
        incumbent = replace(resume.incumbent, plan=replace(resume.incumbent.plan, sliced=graph.products))
        resume = replace(resume, incumbent=incumbent)
    return replace(planned, plan=plan, report=replace(planned.report, plan=plan), resume=resume)


def _checked(planned: Planned | BudgetError | None) -> Planned | None:
    if isinstance(planned, BudgetError):
        raise planned
    return planned


def _warn_again(noted: Sequence[warnings.WarningMessage]) -> None:
    for message in noted:
        warnings.warn_explicit(message.message, message.category, message.filename, message.lineno)
