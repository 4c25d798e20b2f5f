"""Plans for graphs that contain both a forward and its backward: a recomputed value is a copy of a node late in the same graph."""

from __future__ import annotations

import time
from dataclasses import replace

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.errors import BudgetError, RematError
from compile_remat.partitioning.joint_split import PlannerFailed, record_planned
from compile_remat.passes import PlainFacts, extract, plain_option, timeline
from compile_remat.passes.graph.inner_backward import (
    InnerBackward,
    as_joint,
    backward_calls,
    merged,
    with_whole_forward,
    without_common_subexpressions,
)
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.rewrite_list import apply
from compile_remat.passes.graph.rewrites.contract import Context, Stage
from compile_remat.planning.budget_source import EffectiveBudget, bytes_of
from compile_remat.planning.joint_planning import Planned
from compile_remat.planning.joint_problem import JointModule, PlanContext, priced_problem
from compile_remat.planning.pipeline import plan_graph
from compile_remat.planning.request import Fit, FitBelow, Request
from compile_remat.planning.settings import Settings


def with_copies_in_backward(
    module: fx.GraphModule, settings: Settings, request: Request, plain: PlainFacts | None = None
) -> fx.GraphModule:
    """Returns the graph rewritten under a plan and records the plan; returns `module` if it has no backward or is not functional.

    Several backwards in one graph are planned in turn, each up to its end; earlier backwards count as part of its forward.  If no
    plan fits a budget in bytes, the lowest plan is taken; the emitted code then shows if it fits.

    Args:
        request: Any request but `FitBelow` becomes `Fit`: regions that share the budget hold nothing while this graph runs.
        plain: Observed facts of plain torch.compile for the whole graph; None if it was not observed.

    Raises:
        PlannerFailed: Any exception but a `RematError`, which is raised as it is.
    """
    if not backward_calls(module):
        return module
    start_time = time.perf_counter()
    request = request if isinstance(request, FitBelow) else Fit()
    try:
        with without_common_subexpressions(module) as given:
            merged_graph, planned = _backwards_planned(given, settings, request, plain)
    except RematError:
        raise
    except Exception as error:
        raise PlannerFailed(f"{type(error).__name__}: {error}") from error
    if planned is None:
        return module
    apply(Stage.BACKWARD, merged_graph, Context(by_inductor=True, guarded=True))
    record_planned(planned, settings, start_time)
    return merged_graph


def _backwards_planned(
    module: fx.GraphModule, settings: Settings, request: Request, plain: PlainFacts | None
) -> tuple[fx.GraphModule, Planned | None]:
    """Returns the graph with each of its backwards under a plan, and the plan of the last backward; None if nothing was planned.

    With several backwards, an earlier one is part of the forward of a later one, and the plan has the peak of the merged graph.
    """
    calls, planned = backward_calls(module), None
    has_several = len(calls) > 1
    if settings.budget.kind == "fraction" and (has_several or plain is not None):
        settings = _with_plain_bytes(settings, module, calls[-1], plain)
    target_bytes = bytes_of(EffectiveBudget(settings.budget, plain_bytes=settings.plain_bytes)) if has_several else None
    if target_bytes is not None and not isinstance(request, FitBelow):
        request = FitBelow(target_bytes)
    for call in calls:
        found = _planned(module, call, settings, request)
        if found is not None:
            inner, planned = found
            forward, backward = extract(planned.joint, planned.plan)
            module = merged(inner, forward, backward, (n.name for n in planned.joint.info.tangents_closure))
    return module, planned if planned is None or not has_several else _with_peak_of(module, planned, settings)


def _with_plain_bytes(
    settings: Settings, module: fx.GraphModule, last_call: str, observed: PlainFacts | None
) -> Settings:
    """Returns the settings with `plain_bytes` at least the peak of plain torch.compile for the whole graph as it was given."""
    if observed is not None:
        return replace(settings, plain_bytes=max(settings.plain_bytes, observed.peak_bytes))
    inner = as_joint(module, last_call)
    if inner is None:
        return settings
    joint = _joint(inner)
    problem = priced_problem(joint, settings, joint_graph.plain_choice(joint))
    plain = plain_option(problem)
    return replace(settings, plain_bytes=max(settings.plain_bytes, plain.peak_bytes))


def _with_peak_of(module: fx.GraphModule, planned: Planned, settings: Settings) -> Planned:
    """Returns the last plan with the peak of the merged graph, in which nothing is left to choose."""
    inner = as_joint(module, None)
    if inner is None:
        return planned
    problem = priced_problem(_joint(inner), settings, ())
    names = tuple(value.name for value in problem.values if value.is_saveable)
    seen, report = timeline(problem, replace(planned.plan, saved=names, again=())), planned.report
    plan = replace(
        planned.plan, peak_bytes=seen.peak_bytes, forward_peak_bytes=seen.forward_peak_bytes, largest=seen.largest
    )
    floor_bytes = None if report.floor_bytes is None else plan.peak_bytes
    return replace(planned, plan=plan, report=replace(report, plan=plan, floor_bytes=floor_bytes))


def _joint(inner: InnerBackward) -> joint_graph.Joint:
    return with_whole_forward(as_in_torch(inner.module, num_fwd_outputs=inner.num_fwd_outputs))


def _planned(
    module: fx.GraphModule, call: str, settings: Settings, request: Request
) -> tuple[InnerBackward, Planned] | None:
    """Returns the joint graph up to the end of a backward, and its plan; None if there is nothing to choose."""
    try:
        inner = as_joint(module, call)
        found = None if inner is None else _plan(inner, settings, request)
    except BudgetError as error:
        inner = as_joint(module, call)  # planning has rewritten the first one
        found = None if inner is None else _plan(inner, settings, FitBelow(error.budget_bytes))
    return None if inner is None or found is None else (inner, found)


def _plan(inner: InnerBackward, settings: Settings, request: Request) -> Planned | None:
    graph = JointModule(inner.module, inner.num_fwd_outputs)
    return plan_graph(graph, settings, request, PlanContext(has_deadline=False, is_inner=True))
