"""The forecast of one rank of a mesh that need not be present."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compile_remat._util.collector import collector_paused
from compile_remat._util.frame_chunk import frames_in_one_chunk
from compile_remat._util.progress import Advance
from compile_remat.cost_models import Links
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.forecasting import effective_budget_of
from compile_remat.forecast.mesh.communication import Work, links_of, step_time_ns, times_in_graph, with_ddp, with_fsdp
from compile_remat.forecast.mesh.layout import MeshLayout
from compile_remat.forecast.mesh.rank_figures import RankForecast, RankGraph
from compile_remat.forecast.mesh.rank_plans import RankPlans, plans_for
from compile_remat.forecast.mesh.rank_trace import RankTrace, trace_rank
from compile_remat.forecast.mesh.step_moments import graph_bytes_of, moments_of, wrapper_bytes
from compile_remat.forecast.target_step import Ready, Target, optimizer_workspace_bytes, ready_on
from compile_remat.passes import Plan, Problem, plain_time_ns
from compile_remat.planning.joint_allocation import RegionCall


@frames_in_one_chunk
@collector_paused()
def forecast_rank(
    builder: Builder,
    target: Target,
    layout: MeshLayout,
    network: str | None = None,
    advance: Advance = lambda text="", count=1: None,
) -> RankForecast:
    """Plan the step of one rank.  Allocates no parameter, runs no step, and communicates with no other process.

    Args:
        builder: The model; its batch is the batch of one data parallel rank.
        target: The device of each rank; its host memory is that of a node, divided among the ranks there.
        network: The link between nodes, if it differs from the device's.
        advance: Called with a text at the start of each part of the work.

    Raises:
        BudgetError: The budget was given, and no plans keep it.
        RematError: A setting is invalid, or the model cannot be traced.
    """
    start = time.perf_counter()
    if target.host_bytes is not None:
        target = replace(target, host_bytes=target.host_bytes // layout.node_ranks)
    device = target.figures()
    links = links_of(device, layout, network)
    advance(f"building {builder.name}")
    trace = trace_rank(builder, device, layout, lambda graph: times_in_graph(graph, links), advance)
    shards = trace.shards
    state_bytes = target.optimizer.of(shards.gradient_bytes)
    calls, beside_bytes = _calls(trace), 0
    if target.budget.kind == "auto" and len(calls) > 1:
        beside = wrapper_bytes(trace.calls, shards)
        calls = [replace(call, beside_bytes=nbytes) for call, nbytes in zip(calls, beside, strict=True)]
    else:
        beside_bytes = shards.held.beside_bytes
    others = {
        "parameters": shards.parameter_bytes,
        "optimizer state": state_bytes,
        "inputs": trace.input_bytes,
        "what is gathered and reduced": beside_bytes,
    }
    effective = effective_budget_of(target, target.limit_bytes, others)
    advance("searching for plans")
    graphs = [ready_on(traced, target, effective.budget) for traced in trace.graphs]
    found = plans_for(graphs, calls, effective)
    plain_ns = [plain_time_ns(graph.with_torch) for graph in graphs]
    plans = tuple(replace(plan, plain_time_ns=ns) for plan, ns in zip(found.plans, plain_ns, strict=True))
    found = replace(found, plans=plans)
    taken = [graph_bytes_of(graph.planner, plan) for graph, plan in zip(graphs, found.plans, strict=True)]
    workspace_bytes = optimizer_workspace_bytes(target, shards.gradient_bytes, shards.largest_bytes)
    moments = moments_of(trace.calls, calls, taken, shards, workspace_bytes)
    times = _times(trace, graphs, found, layout, links)
    counts = Counter(call.graph for call in trace.calls)
    return RankForecast(
        model=builder.name,
        device=device.name,
        mesh=str(layout),
        shard=layout.shard,
        num_ranks=layout.num_ranks,
        dtype=builder.dtype_name,
        param_dtype=layout.param_dtype or "",
        node_ranks=layout.node_ranks,
        optimizer=str(target.optimizer),
        sizes=builder.sizes(),
        parameter_bytes=shards.parameter_bytes,
        gradient_bytes=shards.gradient_bytes,
        optimizer_bytes=state_bytes,
        input_bytes=trace.input_bytes,
        gathered_bytes=shards.held.gathered_bytes,
        beside_bytes=shards.held.beside_bytes,
        peak_bytes=found.peak_bytes,
        peak_moment=max(moments, key=lambda moment: moment.nbytes),
        floor_bytes=found.floor_bytes,
        limit_bytes=target.limit_bytes,
        budget_bytes=found.budget_bytes,
        graphs=tuple(RankGraph(trace.names[k], counts[k], plan) for k, plan in enumerate(found.plans)),
        kernel_time_ns=times.kernel_ns,
        collective_time_ns=times.collective_ns,
        step_time_ns=times.step_ns,
        extra_time_ns=sum(plan.time_ns - plan.base.time_ns for plan in (plans[call.graph] for call in trace.calls)),
        plain_peak_bytes=found.plain_bytes,
        message=found.message,
        seconds=time.perf_counter() - start,
    )


def _calls(trace: RankTrace) -> list[RegionCall]:
    """Returns the step for the joint allocation.  FSDP2 reduces and frees a block's gradients at once; other gradients stay."""
    takes = trace.shards.tree is not None
    return [
        RegionCall(call.graph, 0 if takes and call.block is not None else trace.graphs[call.graph].trainable_bytes)
        for call in trace.calls
    ]


@dataclass(frozen=True)
class _Times:
    kernel_ns: int
    collective_ns: int | None
    step_ns: int


def _times(
    trace: RankTrace, graphs: Sequence[Ready], found: RankPlans, layout: MeshLayout, links: Links | None
) -> _Times:
    work = [_work(graphs[call.graph].problem, found.plans[call.graph]) for call in trace.calls]
    inside_ns = sum(ns for call in trace.calls for _, ns in trace.graphs[call.graph].times_ns)
    kernel_ns = sum(each.forward_ns + each.backward_ns for each in work) - inside_ns
    if links is None:
        return _Times(kernel_ns, None, kernel_ns)
    if trace.shards.tree is not None:
        work = with_fsdp(work, trace.calls, trace.shards, layout, links)
    elif layout.dp > 1:
        made = [trace.graphs[call.graph].trainable_bytes for call in trace.calls]
        work = with_ddp(work, made, layout, links)
    outside_ns = sum(each.gather_ns + each.gather_again_ns + each.reduce_ns for each in work)
    return _Times(kernel_ns, inside_ns + outside_ns, step_time_ns(work))


def _work(problem: Problem, plan: Plan) -> Work:
    """Returns the time of one run of a graph: recomputation is added to the backward, the rest is split as its kernels are."""
    forward_ns = sum(value.time_ns for value in problem.values if value.in_forward)
    backward_ns = sum(step.time_ns for step in problem.steps)
    forward_ns = plan.once_time_ns * forward_ns // max(1, forward_ns + backward_ns)
    return Work(forward_ns, plan.time_ns - forward_ns)
