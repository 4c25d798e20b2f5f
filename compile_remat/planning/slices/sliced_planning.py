"""A plan with rows in slices: the graph is planned with 2, 4, ... slices where the budget is not met without.

Each number of slices makes another joint graph of the one that torch gave, which is planned like any other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from compile_remat._torch.sizes import symbols_of
from compile_remat._util.units import format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.errors import BudgetError
from compile_remat.passes import NotSliced, SlicedGraph, Status, slice_largest, slice_products
from compile_remat.planning.joint_planning import Planned
from compile_remat.planning.narrowing.narrowed_planning import copied, plan_with_narrowing
from compile_remat.planning.plan_store import store_plan
from compile_remat.planning.request import Fit, FitBelow, Request, Resume, interrupted_by
from compile_remat.planning.settings import SLICES, Settings
from compile_remat.report import joined

OFF, AUTO = SLICES["off"], SLICES["auto"]

NUMBERS = (2, 4, 8, 16, 32, 64)
"""The numbers of slices that `auto` tries."""

SAME_PEAK = 0.99
"""More slices have to lower a minimum peak by more than this to be taken."""


def plan_with_slices(
    joint_module: fx.GraphModule,
    settings: Settings,
    request: Request,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    **keywords: Any,
) -> Planned | None:
    """`plan_with_narrowing`, in a graph with rows in slices where the settings ask for them.

    Under `max`, and in a graph that shares its budget with others, there are none.

    Raises:
        BudgetError: No plan fits the budget, with any number of slices.
    """
    outputs: dict[str, Any] = {
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_indices": static_lifetime_input_indices,
    }
    given = outputs | keywords
    is_for_slices = isinstance(interrupted_by(request), Fit | FitBelow) and not keywords.get("is_inner")
    if settings.slices == OFF or not is_for_slices:
        return plan_with_narrowing(joint_module, settings, request, **given)
    search = _Search(copied(joint_module), settings, request, outputs, given)
    if isinstance(request, Resume):
        return search.resumed(request)
    planned = search.run(joint_module)
    if planned is not None and planned.resume is None and planned.plan.status is not Status.REPLAYED:
        store_plan(planned.plan, settings.plan_dir)
    return planned


@dataclass(frozen=True)
class _Search:
    """Looks for the number of slices of one graph.

    Attributes:
        module: The graph as torch gave it.
        outputs: What tells its outputs from its gradients.
        keywords: All that `plan_joint` takes.
    """

    module: fx.GraphModule
    settings: Settings
    request: Request
    outputs: dict[str, Any]
    keywords: dict[str, Any]

    def resumed(self, request: Resume) -> Planned | None:
        """The incumbent of a search that a deadline has ended, in its own graph."""
        graph = slice_products(copied(self.module), request.incumbent.plan.sliced, **self.outputs)
        return plan_with_narrowing(graph.module, self.settings, request, **self.keywords)

    def run(self, joint_module: fx.GraphModule) -> Planned | None:
        """The plan without slices where that is within the budget; else the fastest that is, or the lowest one."""
        with warnings.catch_warnings(record=True) as noted:
            whole = self._attempt(joint_module, self.settings, self.keywords)
        is_max = not isinstance(whole, BudgetError | None) and whole.report.budget == str(MemoryBudget("max"))
        is_met = self.settings.slices == AUTO and self._is_met(whole)
        if whole is None or is_max or is_met:
            _warn_again(noted)
            return _checked(whole)
        found: list[tuple[int, Planned | BudgetError]] = [(1, whole)] if self.settings.slices == AUTO else []
        left: tuple[NotSliced, ...] = ()
        for number, graph in self._graphs():
            left = graph.left
            if not graph.products:
                break
            found.append((number, self._sliced(graph, whole)))
            if self._is_slower(found):
                break
        return self._concluded(found or [(1, whole)], left, noted)

    def _graphs(self) -> Iterator[tuple[int, SlicedGraph]]:
        for number in NUMBERS if self.settings.slices == AUTO else (self.settings.slices,):
            yield number, slice_largest(copied(self.module), number, **self.outputs)

    def _sliced(self, graph: SlicedGraph, whole: Planned | BudgetError) -> Planned | BudgetError:
        """The plan of a graph in slices, under the bytes that the whole graph had to keep."""
        settings = self.settings
        if isinstance(whole, Planned) and settings.budget.kind == "fraction" and whole.plan.budget_bytes:
            settings = replace(settings, budget=MemoryBudget("bytes", whole.plan.budget_bytes), from_auto=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a plan that is not taken
            planned = self._attempt(graph.module, settings, self.keywords | {"with_plain": False})
        if not isinstance(planned, Planned):
            assert planned is not None
            return planned
        text = "rows in slices: " + ", ".join(f"{p.name} in {p.slices}" for p in graph.products)
        plan = replace(planned.plan, sliced=graph.products)
        report = replace(planned.report, plan=plan, message=joined(planned.report.message, text))
        if isinstance(whole, Planned):
            report = replace(report, budget=whole.report.budget, plain=whole.report.plain)
        resume = planned.resume
        if resume is not None:
            incumbent = replace(resume.incumbent, plan=replace(resume.incumbent.plan, sliced=graph.products))
            resume = replace(resume, incumbent=incumbent)
        return replace(planned, plan=plan, report=report, resume=resume)

    def _attempt(
        self, module: fx.GraphModule, settings: Settings, keywords: dict[str, Any]
    ) -> Planned | BudgetError | None:
        try:
            return plan_with_narrowing(module, settings, self.request, **keywords, is_stored=False)
        except BudgetError as error:
            return error

    def _is_met(self, planned: Planned | BudgetError | None) -> bool:
        """Whether a plan keeps what was asked; never where the lowest is asked for."""
        if not isinstance(planned, Planned) or planned.report.budget == str(MemoryBudget("min")):
            return False
        request = interrupted_by(self.request)
        limit = request.target_bytes if isinstance(request, FitBelow) else planned.plan.budget_bytes
        return limit is not None and planned.plan.peak_bytes <= limit

    def _is_slower(self, found: Sequence[tuple[int, Planned | BudgetError]]) -> bool:
        """Whether the last number of slices is within the budget, as fewer were in less time."""
        times = [_time_ns(planned) for _, planned in found if self._is_met(planned)]
        return len(times) > 1 and times[-1] >= times[-2]

    def _concluded(
        self,
        found: Sequence[tuple[int, Planned | BudgetError]],
        left: Sequence[NotSliced],
        noted: Sequence[warnings.WarningMessage],
    ) -> Planned:
        kept = [planned for _, planned in found if isinstance(planned, Planned) and self._is_met(planned)]
        if kept:
            return min(kept, key=_time_ns)
        best = found[0][1]
        for _, planned in found:
            if _peak_bytes(planned) < SAME_PEAK * _peak_bytes(best):
                best = planned
        is_whole = all(number == 1 for number, _ in found)
        told = [_text(refusal) for refusal in left if refusal.is_output or is_whole]
        if symbols_of(self.module.graph):
            told = ["rows of dynamic sizes are not computed in slices"]
        text = "; ".join(told)
        if isinstance(best, BudgetError):
            raise best.with_hint(text) if text else best
        if best is found[0][1]:
            _warn_again(noted)
        return replace(best, report=replace(best.report, message=joined(best.report.message, text)))


def _checked(planned: Planned | BudgetError | None) -> Planned | None:
    if isinstance(planned, BudgetError):
        raise planned
    return planned


def _time_ns(planned: Planned | BudgetError) -> int:
    assert isinstance(planned, Planned)
    return planned.plan.step_time_ns + planned.plan.extra_time_ns


def _peak_bytes(planned: Planned | BudgetError) -> int:
    return planned.floor_bytes if isinstance(planned, BudgetError) else planned.plan.peak_bytes


def _text(refusal: NotSliced) -> str:
    if refusal.is_output:
        return f"logits are an output: {format_bytes(refusal.nbytes)} cannot be sliced; return the loss alone"
    return f"{refusal.name}: {format_bytes(refusal.nbytes)} cannot be sliced: {refusal.reason}"


def _warn_again(noted: Sequence[warnings.WarningMessage]) -> None:
    for message in noted:
        warnings.warn_explicit(message.message, message.category, message.filename, message.lineno)
