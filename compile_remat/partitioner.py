"""The partition: joint graph in, forward and backward out, with a plan between them.

`plan_joint` and `partition` are the whole pipeline as functions; `RematPartitioner` is the immutable, picklable value that
Inductor keeps in its cache key, so every figure that can change a plan is one of its fields.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx

from compile_remat import _torch
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import CostModel, Device, OpKind, describe, load_device, make_cost_model
from compile_remat.errors import BudgetError, LiveTensor, PlanMismatchError, PlannerWarning, RematError
from compile_remat.passes import Plan, Planner, Problem, Status, build_problem, extract
from compile_remat.report import Report, record
from compile_remat.units import format_bytes

LOG = logging.getLogger("compile_remat")


@dataclass(frozen=True)
class Settings:
    """What the partition needs of the configuration, with everything looked up.

    Attributes:
        budget: Never `auto`: that has become bytes or `max`.
        from_auto: Whether it was; then a budget below the floor takes the lowest plan with a warning.
        device: Figures that the cost model prices with.
    """

    budget: MemoryBudget
    device: Device
    cost_model: str = "roofline"
    from_auto: bool = False
    plan_dir: str | None = None
    report_dir: str | None = None

    def cost(self) -> CostModel:
        """The cost model for the device."""
        return make_cost_model(self.cost_model, self.device)


class PlannerFailed(Exception):
    """The planner broke on a graph; carries the reason to whoever can enter torch again."""


@dataclass(frozen=True)
class Planned:
    """A plan with the graph it belongs to."""

    joint: _torch.Joint
    cost: CostModel
    problem: Problem
    plan: Plan
    report: Report


def plan_joint(
    joint_module: fx.GraphModule,
    settings: Settings,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> Planned | None:
    """Plan one joint graph; None where nothing depends on a tangent, so that there is nothing to choose.

    Raises:
        BudgetError: No plan fits the budget.
        PlanMismatchError: `plan_dir` holds a plan under this graph's name that does not fit it.
    """
    start = time.perf_counter()
    joint = _torch.prepare(
        joint_module,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=static_lifetime_input_indices,
    )
    if not joint.has_backward:
        return None
    reference = _torch.torch_choice(joint) if settings.budget.kind == "max" else ()
    cost = settings.cost()
    problem = build_problem(joint, cost=cost, reference=reference)
    planner = Planner(problem)
    plan, message = _stored_plan(planner, settings), ""
    if plan is None:
        plan, message = _new_plan(planner, settings)
        _store_plan(plan, settings)
    floor = plan.peak_bytes if settings.budget.kind == "min" or message else None
    seconds = time.perf_counter() - start
    report = Report(plan.problem_key, str(settings.budget), plan.budget_bytes, plan, floor, seconds, message)
    return Planned(joint, cost, problem, plan, report)


def _new_plan(planner: Planner, settings: Settings) -> tuple[Plan, str]:
    budget = settings.budget
    if budget.kind == "max":
        return planner.reference(), ""
    if budget.kind == "min":
        return planner.lowest(), ""
    if budget.kind == "fraction":
        budget_bytes = int(float(budget.value or 0) * planner.fastest().peak_bytes)
    else:
        budget_bytes = int(budget.value or 0)
    plan = planner.within(budget_bytes)
    if plan.is_feasible:
        return plan, ""
    if not settings.from_auto:
        raise BudgetError(budget_bytes, plan.peak_bytes, tuple(_live_tensor(b) for b in plan.largest))
    message = (
        f"the memory that is free ({format_bytes(budget_bytes)}) is less than the lowest reachable peak "
        f"({format_bytes(plan.peak_bytes)}); this is the lowest plan"
    )
    warnings.warn(f"compile_remat: {message}", PlannerWarning, stacklevel=2)
    return plan, message


def _live_tensor(buffer: Any) -> LiveTensor:
    name = f"{buffer.name} ({buffer.role})"
    return LiveTensor(name, buffer.nbytes, buffer.shape, buffer.dtype, buffer.module_path, buffer.source_line)


# -- plans on disk ----------------------------------------------------------------------------------------------------


def _plan_path(key: str, settings: Settings) -> Path | None:
    return None if settings.plan_dir is None else Path(settings.plan_dir) / f"{key}.plan.json"


def _stored_plan(planner: Planner, settings: Settings) -> Plan | None:
    """The plan that was pinned for this graph; its figures are worked out anew, its choice is obeyed."""
    key = planner.problem.key()
    path = _plan_path(key, settings)
    if path is None or not path.exists():
        return None
    try:
        stored = Plan.from_json(path.read_text())
    except (ValueError, KeyError, TypeError) as error:
        raise PlanMismatchError(
            f"{path} is not a plan of this version: {error}. Delete it to have a new plan written."
        ) from None
    if stored.problem_key != key:
        raise PlanMismatchError(
            f"{path} holds the plan of graph {stored.problem_key}, but this graph is {key}: the model, its sizes, the "
            "device's figures or the version changed. Delete it to have a new plan written."
        )
    try:
        mask = planner.mask_of(stored.saved)
    except KeyError as error:
        raise PlanMismatchError(f"{path} saves {error}, which this graph does not have.") from None
    return replace(planner.plan_of(mask, stored.budget_bytes), status=Status.REPLAYED)


def _store_plan(plan: Plan, settings: Settings) -> None:
    path = _plan_path(plan.problem_key, settings)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plan.to_json() + "\n")


# -- joint graph -> two modules -----------------------------------------------------------------------------------------


def split(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    settings: Settings,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Plan and extract.  What breaks in the planner becomes `PlannerFailed`; a `RematError` passes."""
    start = time.perf_counter()
    try:
        planned = plan_joint(
            joint_module,
            settings,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )
        if planned is not None:
            modules = extract(planned.joint, planned.plan)
    except RematError:
        raise
    except Exception as error:
        raise PlannerFailed(f"{type(error).__name__}: {error}") from error
    if planned is None:
        return _torch.torch_partition(
            joint_module,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )
    report = replace(planned.report, planning_time_s=time.perf_counter() - start)
    record(report, settings.report_dir)
    LOG.info("%s", report)
    return modules


def split_without_planner(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    reason: str,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Our pipeline with the set that torch's chooser takes, plus what must be saved; torch's partition if that fails."""
    keywords: dict[str, Any] = {
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_indices": static_lifetime_input_indices,
    }
    try:
        joint = _torch.prepare(joint_module, **keywords)
        if joint.has_backward:
            chosen = _torch.torch_choice(joint)
            return _torch.extract_modules(joint, dict.fromkeys([*chosen, *pinned_nodes(joint)]))
    except Exception:
        LOG.warning("the fallback failed as well (after: %s); torch's own partition takes over", reason, exc_info=True)
    return _torch.torch_partition(joint_module, joint_inputs, **keywords)


def pinned_nodes(joint: _torch.Joint) -> list[fx.Node]:
    """What must not be computed twice: tagged to be saved, random, or reading an input that the forward mutates."""
    stale, pinned = _torch.mutated_inputs(joint), set[fx.Node]()
    for node in joint.module.graph.nodes:
        if node.op != "call_function" or node in joint.info.tangents_closure or _mutates(node):
            continue
        op = describe(node)
        reads_stale = any(n in stale for n in node.all_input_nodes)
        if reads_stale and op.kind is OpKind.VIEW:
            stale.add(node)
        elif reads_stale or op.is_random or _torch.policy_of(node) == "save":
            pinned.add(node)
        elif op.kind is OpKind.ITEM and not pinned.isdisjoint(node.all_input_nodes):
            pinned.add(node)
    return [n for n in joint.module.graph.nodes if n in pinned and _torch.storage_nbytes(n.meta.get("val"))]


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def partition(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    memory_budget: object = "max",
    device: str = "cpu",
    cost_model: str = "roofline",
    static_lifetime_input_indices: Sequence[int] | None = None,
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph inside a memory budget: a ``partition_fn`` for ``functorch.compile.aot_function``.

    Args:
        joint_module: AOTAutograd's joint graph; rewritten in place (dead code, CSE).
        memory_budget: Any form but `auto`, which needs a device to look at.
        device: A name of the device table or a JSON file, for the cost model.

    Raises:
        BudgetError: No plan fits; ConfigError, DeviceError: a setting is off.
    """
    budget = MemoryBudget.parse(memory_budget)
    settings = Settings(MemoryBudget("max") if budget.kind == "auto" else budget, load_device(device), cost_model)
    keywords: dict[str, Any] = {
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_indices": static_lifetime_input_indices,
    }
    try:
        return split(joint_module, joint_inputs, settings, **keywords)
    except PlannerFailed as error:
        warn_of_fallback(error)
        return split_without_planner(joint_module, joint_inputs, str(error), **keywords)


def warn_of_fallback(error: PlannerFailed) -> None:
    """Say that the planner failed and that training goes on."""
    warnings.warn(
        f"compile_remat: the planner failed ({error}); this graph runs with torch's own choice of saved tensors and "
        "no promise about its peak. Please report this.",
        PlannerWarning,
        stacklevel=3,
    )
