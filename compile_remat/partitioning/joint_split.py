"""Splits a joint graph into forward and backward under a plan; falls back to torch's own choice if the planner fails."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from compile_remat._torch import cache_key_text, joint_graph
from compile_remat._torch.dynamo.names import compiled_name
from compile_remat._torch.input_mutation import writes_in_place
from compile_remat._torch.version import version_problem
from compile_remat._util.collector import collector_paused
from compile_remat._util.frame_chunk import frames_in_one_chunk
from compile_remat._util.units import format_bytes
from compile_remat.announcement import announce
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import Times, load_device
from compile_remat.errors import ConfigError, PassError, RematError, warn
from compile_remat.passes import Plan, Planner, Status, extract, plain_option
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.pins import must_be_saved
from compile_remat.passes.graph.read_inputs import inputs_handed_over, positions_of_inputs
from compile_remat.passes.graph.rewrite_list import apply, apply_to_joint
from compile_remat.passes.graph.rewrites.contract import Context, Stage
from compile_remat.passes.graph.snapshots import readable_inputs, unreadable_inputs
from compile_remat.planning import op_timing
from compile_remat.planning.budget_source import EffectiveBudget, bytes_of
from compile_remat.planning.deadline import DeadlineReached
from compile_remat.planning.joint_planning import Planned
from compile_remat.planning.joint_problem import JointModule, PlanContext, priced_problem
from compile_remat.planning.pipeline import plan_graph
from compile_remat.planning.plain_peaks import note_plain_peak
from compile_remat.planning.request import Fit, Request
from compile_remat.planning.settings import Settings, with_plain_bytes
from compile_remat.report import Report, record

LOG = logging.getLogger("compile_remat")


class PlannerFailed(Exception):
    """The planner broke on a graph; carries the reason to the caller that compiles again without the planner."""


@frames_in_one_chunk
@collector_paused()
def split(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    settings: Settings,
    request: Request,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    by_inductor: bool = False,
    guarded: bool = False,
    is_cached: bool = False,
    context: PlanContext | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Plan the joint graph; returns its forward and backward modules, or torch's partition if there is nothing to plan.

    Args:
        by_inductor, guarded: See `Context`.
        is_cached: True if torch stores the returned modules in its cache.

    Raises:
        DeadlineReached: The deadline ended the search, and `is_cached` is True.
        PlannerFailed: The planner raised any exception but a `RematError`, which is raised as it is.
    """
    start = time.perf_counter()
    try:
        graph = JointModule(joint_module, num_fwd_outputs, static_lifetime_input_indices)
        planned = plan_graph(graph, settings, request, context)
        if planned is not None:
            if is_cached and planned.resume is not None:
                raise DeadlineReached(planned.resume)
            forward, backward = extract(planned.joint, planned.plan)
            if not settings.inputs_are_constant:
                _check_inputs(planned.joint, backward)
            report = _with_inputs(planned, forward)
            known = Context(joint=planned.joint, forward=forward, by_inductor=by_inductor, guarded=guarded)
            apply(Stage.FORWARD, forward, known)
            apply(Stage.BACKWARD, backward, known)
    except (RematError, DeadlineReached):
        raise
    except Exception as error:
        raise PlannerFailed(f"{type(error).__name__}: {error}") from error
    if planned is None:
        return joint_graph.torch_partition(
            joint_module,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )
    record_planned(replace(planned, report=report), settings, start)
    return forward, backward


def _check_inputs(joint: joint_graph.Joint, backward: fx.GraphModule) -> None:
    """Raise if a backward reads an input that may have changed by then: torch's own choice is better than wrong gradients."""
    if read := unreadable_inputs(joint, backward):
        raise AssertionError(f"the backward reads {', '.join(read)}, which that of plain torch.compile does not")


def _with_inputs(planned: Planned, forward: fx.GraphModule) -> Report:
    """Returns the report with the inputs that this backward reads, if plain torch.compile's backward does not read them all."""
    joint = planned.joint
    if joint.readable is None:
        return planned.report
    read = inputs_handed_over(forward, joint.num_fwd_outputs)
    plain = positions_of_inputs(joint, joint.readable.names)
    beyond = tuple(sorted(read - plain))
    as_plain = tuple(sorted(read & plain)) if beyond else ()
    return replace(planned.report, inputs_beyond_plain=beyond, inputs_as_plain=as_plain)


def record_planned(planned: Planned, settings: Settings, start_time: float) -> None:
    """Record the report of a plan that will run, with the seconds since `start_time` (of ``time.perf_counter``)."""
    seconds, name = time.perf_counter() - start_time, compiled_name(planned.joint.module.graph)
    report = replace(planned.report, planning_time_s=seconds, module=name)
    note_plain_peak(settings.device.name, report)
    announce(record(report))


def split_without_planner(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    settings: Settings,
    reason: str,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Save the nodes that torch's chooser picks and the nodes that must be saved; fall back to torch's partition if that fails."""
    keywords: dict[str, Any] = {
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_indices": static_lifetime_input_indices,
    }
    message = f"the planner failed ({reason}); torch's own choice of saved tensors runs"
    try:
        context = Context(passes=settings.joint_passes)
        joint = apply_to_joint(as_in_torch(joint_module, **keywords), context).joint
        if joint.has_backward:
            chosen = joint_graph.torch_choice(joint)
            saved = list(dict.fromkeys([*chosen, *must_be_saved(joint), *joint_graph.forward_only(joint)]))
            modules = joint_graph.extract_modules(joint, saved)
            joint = replace(joint, readable=readable_inputs(joint, chosen))
            _record_fallback(joint_module, settings, message, _describe(joint, saved, settings))
            return modules
    except PassError:
        raise
    except Exception:
        LOG.warning("the fallback failed as well (after: %s); torch's own partition takes over", reason, exc_info=True)
        _record_fallback(joint_module, settings, f"{message}, in torch's own partition")
    return joint_graph.torch_partition(joint_module, joint_inputs, **keywords)


def _describe(joint: joint_graph.Joint, saved: Sequence[fx.Node], settings: Settings) -> Plan | None:
    """Returns the plan that saves these nodes, for the report; None if the planner breaks on it again."""
    try:
        context = Context(has_snapshots=not settings.inputs_are_constant)
        joint = apply_to_joint(joint, context, only=["add_snapshots"]).joint
        problem = priced_problem(joint, settings, saved)
        plain_bytes = max(settings.plain_bytes, plain_option(problem).peak_bytes)
        budget_bytes = bytes_of(EffectiveBudget(settings.budget, plain_bytes=plain_bytes))
        return replace(Planner(problem).torch_default(budget_bytes), status=Status.FALLBACK)
    except Exception:
        LOG.info("the fallback has no predicted peak", exc_info=True)
        return None


def _record_fallback(module: fx.GraphModule, settings: Settings, message: str, plan: Plan | None = None) -> None:
    budget, budget_bytes = settings.budget, None
    if plan is not None:
        key, budget_bytes = plan.problem_key, plan.budget_bytes
        message += f", with a predicted peak of {format_bytes(plan.peak_bytes)}"
    else:
        key = hashlib.sha256("\n".join(cache_key_text.graph_lines(module)).encode()).hexdigest()[:16]
        budget_bytes = int(budget.value or 0) if budget.kind == "bytes" else None
    record(Report(key, str(budget), budget_bytes, plan, message=message))


def partition(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    memory_budget: object = None,
    device: str = "cpu",
    cost_model: str = "roofline",
    static_lifetime_input_indices: Sequence[int] | None = None,
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph inside a memory budget: a ``partition_fn`` for ``functorch.compile.aot_function``.

    Args:
        joint_module: AOTAutograd's joint graph; rewritten in place (dead code, CSE).
        memory_budget: Any form of the setting; `auto` needs a device to look at and becomes `max`.  With None, torch's own
            ``activation_memory_budget`` holds if it is set, as a fraction; else `max`.
        device: A name in the device table or the path of a JSON file, for the cost model.

    Raises:
        BudgetError: No plan fits the budget.
        ConfigError, DeviceError: A setting is invalid, or the graph is not functional.

    Examples:
        >>> from functools import partial
        >>> from functorch.compile import aot_module, nop
        >>> layers = [layer for _ in range(20) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
        >>> split = partial(compile_remat.partition, memory_budget="30MiB")
        >>> compiled = aot_module(torch.nn.Sequential(*layers), fw_compiler=nop, bw_compiler=nop, partition_fn=split)
        >>> compiled(torch.randn(2048, 256)).mean().backward()  # runs the two graphs as they are
        >>> f"{compile_remat.reports()[-1].plan.peak_bytes / 2**20:.1f} MiB"
        '28.3 MiB'
    """
    budget = MemoryBudget("max") if memory_budget is None else MemoryBudget.parse(memory_budget)
    times = op_timing.times_of(joint_module.graph) if cost_model == "profile" else Times()
    settings = with_plain_bytes(
        Settings(
            MemoryBudget("max") if budget.kind == "auto" else budget,
            load_device(device),
            cost_model,
            is_given=memory_budget is not None,
            torch_ratio=joint_graph.config_ratio(),
            times=times,
        )
    )
    keywords: dict[str, Any] = {
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_indices": static_lifetime_input_indices,
    }
    if problem := version_problem():
        warn(f"{problem}: torch's own partition takes this graph")
        return joint_graph.torch_partition(joint_module, joint_inputs, **keywords)
    if written := writes_in_place(joint_module):
        raise ConfigError(
            f"the joint graph is not functional: {written[0].format_node()} writes in place, and an operator that is recomputed "
            "would read other values. Leave functionalization on (aot_function's disable_functionalization=False), or take torch's "
            "default_partition."
        )
    try:
        return split(joint_module, joint_inputs, settings, Fit(), **keywords)
    except PlannerFailed as error:
        warn_of_fallback(str(error))
        return split_without_planner(joint_module, joint_inputs, settings, str(error), **keywords)


def warn_of_fallback(reason: str) -> None:
    """Warn that the planner failed and that training goes on."""
    warn(
        f"the planner failed ({reason}); this graph runs with torch's own choice of saved tensors, and memory_budget may not "
        "hold. Please report this."
    )
