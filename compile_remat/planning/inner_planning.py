"""Plans for graphs that hold a backward beside their forward: what is recomputed is a copy late in the same graph."""

from __future__ import annotations

import time
from dataclasses import replace

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.errors import BudgetError, RematError
from compile_remat.passes import (
    InnerBackward,
    PlainFacts,
    as_in_torch,
    as_joint,
    backward_calls,
    extract,
    keep_matmuls_in_place,
    lay_gradients_out_once,
    merged,
    plain_option,
    timeline,
    with_whole_forward,
    without_common_subexpressions,
)
from compile_remat.planning.budget_source import EffectiveBudget, bytes_of
from compile_remat.planning.joint_planning import Planned, plan_joint, priced_problem
from compile_remat.planning.joint_split import PlannerFailed, record_planned
from compile_remat.planning.request import Fit, FitBelow, Request
from compile_remat.planning.settings import Settings


def with_copies_in_backward(
    module: fx.GraphModule, settings: Settings, request: Request, plain: PlainFacts | None = None
) -> fx.GraphModule:
    """The graph under a plan, which is recorded; the graph itself where it has no backward, or is not functional.

    With several backwards in it, each is planned in turn up to its end, the ones before as part of its forward.  Where no plan fits
    bytes, the lowest one is taken: whether its code fits is seen when it is emitted.

    Args:
        request: Where other regions share the budget, they hold nothing while this graph runs: it has it alone.
        plain: What plain torch.compile takes for the whole graph, where that was observed.

    Raises:
        PlannerFailed: Something of torch's or ours broke; a `RematError` passes.
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
    keep_matmuls_in_place(merged_graph)
    lay_gradients_out_once(merged_graph)
    record_planned(planned, settings, start_time)
    return merged_graph


def _backwards_planned(
    module: fx.GraphModule, settings: Settings, request: Request, plain: PlainFacts | None
) -> tuple[fx.GraphModule, Planned | None]:
    """The graph with each of its backwards under a plan, and the plan of the last one, with the peak of the whole graph.

    The first of several is part of a forward where a later one is planned.  Of several, the peak is that of the merged graph.
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
    """The settings, a fraction being of what plain torch.compile takes for the whole graph as it was given."""
    if observed is not None:
        return replace(settings, plain_bytes=max(settings.plain_bytes, observed.peak_bytes))
    inner = as_joint(module, last_call)
    if inner is None:
        return settings
    joint = _joint(inner)
    problem, _ = priced_problem(joint, settings, joint_graph.plain_choice(joint))
    plain = plain_option(problem)
    return replace(settings, plain_bytes=max(settings.plain_bytes, plain.peak_bytes))


def _with_peak_of(module: fx.GraphModule, planned: Planned, settings: Settings) -> Planned:
    """The last plan with the peak of the graph that came of all, where nothing is left to choose."""
    inner = as_joint(module, None)
    if inner is None:
        return planned
    problem, _ = priced_problem(_joint(inner), settings, ())
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
    """The joint graph up to the end of a backward, and its plan; None where there is nothing to choose."""
    try:
        inner = as_joint(module, call)
        found = None if inner is None else _plan(inner, settings, request)
    except BudgetError as error:
        inner = as_joint(module, call)  # planning has rewritten the first one
        found = None if inner is None else _plan(inner, settings, FitBelow(error.budget_bytes))
    return None if inner is None or found is None else (inner, found)


def _plan(inner: InnerBackward, settings: Settings, request: Request) -> Planned | None:
    num_fwd_outputs = inner.num_fwd_outputs
    return plan_joint(
        inner.module, settings, request, num_fwd_outputs=num_fwd_outputs, has_deadline=False, is_inner=True
    )
