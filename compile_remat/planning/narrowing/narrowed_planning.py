"""A plan with narrow forms of what it saves (`narrow="auto"`), where that is faster, or lower, than one without.

The graph is planned as it is.  Where that plan recomputes something, and narrow forms could spare a part of the peak that counts,
the graph is planned once more with a narrow form of every value that can have one (`passes/graph/rewrites/narrowing.py`), and the
better plan is taken.  Under `max` nothing is narrowed.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import fx

from compile_remat._torch.joint_graph import copied_graph
from compile_remat.budget import MemoryBudget
from compile_remat.errors import BudgetError
from compile_remat.passes import NARROW, Status, as_in_torch, may_narrow, narrowable_bytes
from compile_remat.planning.joint_planning import Planned, plan_joint
from compile_remat.planning.plan_store import store_plan
from compile_remat.planning.request import Fit, FitBelow, Request, Resume, interrupted_by
from compile_remat.planning.settings import Settings

OUTPUTS = ("num_fwd_outputs", "static_lifetime_input_indices")
"""Of `plan_joint`'s arguments, those that tell outputs from gradients."""

LEAST_SHARE = 0.01
"""Narrow forms are tried where they could spare more than this part of the peak."""

FASTER, LOWER = 0.99, 0.99
"""A plan with narrow forms has to have less than this part of the other's extra time, or of its peak."""


def plan_with_narrowing(
    joint_module: fx.GraphModule, settings: Settings, request: Request, *, is_stored: bool = True, **keywords: Any
) -> Planned | None:
    """`plan_joint`, with narrow forms where they help.

    In a graph that shares its budget with others there are none.

    Raises:
        BudgetError: No plan fits the budget, with narrow forms and without.
    """
    is_for_narrowing = isinstance(interrupted_by(request), Fit | FitBelow) and not keywords.get("is_inner")
    if not settings.narrows or not is_for_narrowing or settings.budget.kind == "max" or not may_narrow(joint_module):
        return plan_joint(joint_module, settings, request, is_stored=is_stored, **keywords)
    if isinstance(request, Resume):
        narrows = bool(request.incumbent.plan.narrowed)
        return plan_joint(joint_module, settings, request, is_stored=is_stored, narrows=narrows, **keywords)
    module = copied_graph(joint_module)
    with warnings.catch_warnings(record=True) as noted:
        whole = _attempt(joint_module, settings, request, keywords)
    is_worth_it = _is_worth_it(whole, module, keywords)
    narrowed = _narrowed(module, whole, settings, request, keywords) if is_worth_it else None
    if narrowed is not None and _is_better(narrowed, whole, request):
        return _stored(narrowed, settings) if is_stored else narrowed
    for message in noted:
        warnings.warn_explicit(message.message, message.category, message.filename, message.lineno)
    if isinstance(whole, BudgetError):
        raise whole
    return _stored(whole, settings) if is_stored and whole is not None else whole


def _attempt(
    module: fx.GraphModule, settings: Settings, request: Request, keywords: dict[str, Any], *, narrows: bool = False
) -> Planned | BudgetError | None:
    try:
        return plan_joint(module, settings, request, is_stored=False, narrows=narrows, **keywords)
    except BudgetError as error:
        return error


def _is_worth_it(whole: Planned | BudgetError | None, module: fx.GraphModule, keywords: dict[str, Any]) -> bool:
    """Whether narrow forms may lead to a better plan, as far as one can tell without planning."""
    if whole is None:
        return False
    if isinstance(whole, BudgetError):
        joint = as_in_torch(copied_graph(module), **{name: keywords[name] for name in OUTPUTS if name in keywords})
        return narrowable_bytes(joint) > LEAST_SHARE * whole.floor_bytes
    is_done = whole.report.budget == str(MemoryBudget("max")) or whole.resume is not None
    if is_done or whole.plan.status is Status.REPLAYED or not whole.plan.recomputed:
        return False
    return narrowable_bytes(whole.joint) > LEAST_SHARE * whole.plan.peak_bytes


def _narrowed(
    module: fx.GraphModule,
    whole: Planned | BudgetError | None,
    settings: Settings,
    request: Request,
    keywords: dict[str, Any],
) -> Planned | None:
    """The plan with narrow forms, under the bytes that the plan without had to keep; None where it has none after all."""
    if isinstance(whole, Planned) and settings.budget.kind == "fraction" and whole.plan.budget_bytes:
        settings = replace(settings, budget=MemoryBudget("bytes", whole.plan.budget_bytes), from_auto=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a plan that may not be taken; the other's are said
        planned = _attempt(module, settings, request, keywords | {"with_plain": False}, narrows=True)
    if not isinstance(planned, Planned) or not planned.plan.narrowed:
        return None
    values = {value.name: value.nbytes for value in planned.problem.values}
    spared = sum(values[name] - values[name + NARROW] for name in planned.plan.narrowed)
    report = replace(planned.report, spared_bytes=spared)
    if isinstance(whole, Planned):
        report = replace(report, budget=whole.report.budget, plain=whole.report.plain)
    return replace(planned, report=report)


def _is_better(narrowed: Planned, whole: Planned | BudgetError | None, request: Request) -> bool:
    if narrowed.plan.status is Status.REPLAYED or not isinstance(whole, Planned):
        return True
    limit = request.target_bytes if isinstance(request, FitBelow) else whole.plan.budget_bytes
    peak_bytes, whole_bytes = narrowed.plan.peak_bytes, whole.plan.peak_bytes
    is_missed = limit is None or whole_bytes > limit
    if is_missed and peak_bytes < LOWER * whole_bytes:
        return True
    if peak_bytes > (whole_bytes if limit is None or is_missed else limit):
        return False
    return whole.time_ns - narrowed.time_ns > (1 - FASTER) * whole.plan.extra_time_ns


def _stored(planned: Planned, settings: Settings) -> Planned:
    if planned.resume is None and planned.plan.status is not Status.REPLAYED:
        store_plan(planned.plan, settings.plan_dir)
    return planned
