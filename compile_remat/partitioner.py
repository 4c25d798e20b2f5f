"""The partition: joint graph in, forward and backward out, with a plan between them.

`plan_joint` and `partition` are the whole pipeline as functions; `RematPartitioner` is the immutable, picklable value that
Inductor keeps in its cache key, so every figure that can change a plan is one of its fields.
"""

from __future__ import annotations

import hashlib
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from compile_remat import _torch, _torch_cache
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import CostModel, Device, OpKind, describe, load_device, make_cost_model, tf32_kinds
from compile_remat.errors import BudgetError, LiveTensor, PlanMismatchError, PlannerWarning, RematError
from compile_remat.files import write_atomically
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
        tf32: Kinds of operators that torch lets run in TF32: they are priced so.
        plan_dir: Where plans are pinned.
    """

    budget: MemoryBudget
    device: Device
    cost_model: str = "roofline"
    from_auto: bool = False
    plan_dir: str | None = None
    tf32: tuple[OpKind, ...] = field(default_factory=tf32_kinds)

    def cost(self) -> CostModel:
        """The cost model for the device."""
        return make_cost_model(self.cost_model, self.device, self.tf32)


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
    budget_bytes = _budget_bytes(planner, settings.budget)
    stored = _stored_plan(planner, settings, budget_bytes)
    plan, message = stored or _new_plan(planner, settings, budget_bytes)
    if stored is None:
        _store_plan(plan, settings)
    is_lowest = stored is None and (settings.budget.kind == "min" or not plan.is_feasible)
    floor = plan.peak_bytes if is_lowest else None
    seconds = time.perf_counter() - start
    report = Report(plan.problem_key, str(settings.budget), plan.budget_bytes, plan, floor, seconds, message)
    return Planned(joint, cost, problem, plan, report)


def _budget_bytes(planner: Planner, budget: MemoryBudget) -> int | None:
    """The bytes that a plan has to fit; None where only speed or only memory counts."""
    if budget.kind == "fraction":
        return int(float(budget.value or 0) * planner.fastest().peak_bytes)
    return int(budget.value or 0) if budget.kind == "bytes" else None


def _new_plan(planner: Planner, settings: Settings, budget_bytes: int | None) -> tuple[Plan, str]:
    if budget_bytes is None:
        return planner.lowest() if settings.budget.kind == "min" else planner.reference(), ""
    plan = planner.within(budget_bytes)
    if plan.is_feasible:
        return plan, ""
    if not settings.from_auto:
        raise BudgetError(budget_bytes, plan.peak_bytes, tuple(_live_tensor(b) for b in plan.largest))
    message = (
        f"the memory that is free ({format_bytes(budget_bytes)}) is less than the lowest reachable peak "
        f"({format_bytes(plan.peak_bytes)}); this is the lowest plan"
    )
    warn(message)
    return plan, message


def _live_tensor(buffer: Any) -> LiveTensor:
    name = f"{buffer.name} ({buffer.role})"
    return LiveTensor(name, buffer.nbytes, buffer.shape, buffer.dtype, buffer.module_path, buffer.source_line)


# -- plans on disk ----------------------------------------------------------------------------------------------------


def _plan_path(key: str, settings: Settings) -> Path | None:
    return None if settings.plan_dir is None else Path(settings.plan_dir) / f"{key}.plan.json"


def _stored_plan(planner: Planner, settings: Settings, budget_bytes: int | None) -> tuple[Plan, str] | None:
    """The plan that was pinned for this graph; its figures are worked out anew, its choice is obeyed."""
    key = planner.problem.key()
    path = _plan_path(key, settings)
    if path is None or not path.exists():
        return None
    try:
        stored = Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanMismatchError(f"{path} cannot be read: {error.strerror}.") from None
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
    plan = replace(planner.plan_of(mask, budget_bytes), status=Status.REPLAYED)
    if budget_bytes is None or plan.is_feasible:
        return plan, ""
    message = (
        f"the pinned plan {path} has a predicted peak of {format_bytes(plan.peak_bytes)}, above the budget of "
        f"{format_bytes(budget_bytes)}; delete it to have a new plan written"
    )
    warn(message)
    return plan, message


def _store_plan(plan: Plan, settings: Settings) -> None:
    path = _plan_path(plan.problem_key, settings)
    if path is None:
        return
    try:
        write_atomically(path, plan.to_json() + "\n")
    except OSError as error:
        warn(f"plan_dir: {path} cannot be written ({error}); this plan is not pinned")


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
    record(report)
    LOG.info("%s", report)
    return modules


def split_without_planner(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    settings: Settings,
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
    message = f"the planner failed ({reason}); torch's own choice of saved tensors runs"
    try:
        joint = _torch.prepare(joint_module, **keywords)
        if joint.has_backward:
            saved = list(dict.fromkeys([*_torch.torch_choice(joint), *_pins(joint)]))
            modules = _torch.extract_modules(joint, saved)
            _record_fallback(joint_module, settings, message, _describe(joint, saved, settings))
            return modules
    except Exception:
        LOG.warning("the fallback failed as well (after: %s); torch's own partition takes over", reason, exc_info=True)
        _record_fallback(joint_module, settings, f"{message}, in torch's own partition")
    return _torch.torch_partition(joint_module, joint_inputs, **keywords)


def _describe(joint: _torch.Joint, saved: Sequence[fx.Node], settings: Settings) -> Plan | None:
    """What saving these nodes comes to; None where that breaks what broke the planner."""
    try:
        planner = Planner(build_problem(joint, cost=settings.cost(), reference=saved))
        return replace(planner.torchs_own(_budget_bytes(planner, settings.budget)), status=Status.FALLBACK)
    except Exception:
        LOG.info("the fallback has no predicted peak", exc_info=True)
        return None


def _record_fallback(module: fx.GraphModule, settings: Settings, message: str, plan: Plan | None = None) -> None:
    budget, budget_bytes = settings.budget, None
    if plan is not None:
        key, budget_bytes = plan.problem_key, plan.budget_bytes
        message += f", with a predicted peak of {format_bytes(plan.peak_bytes)}"
    else:
        key = hashlib.sha256("\n".join(_torch_cache.graph_lines(module)).encode()).hexdigest()[:16]
        budget_bytes = int(budget.value or 0) if budget.kind == "bytes" else None
    record(Report(key, str(budget), budget_bytes, plan, message=message))


def _pins(joint: _torch.Joint) -> list[fx.Node]:
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
        warn_of_fallback(str(error))
        return split_without_planner(joint_module, joint_inputs, settings, str(error), **keywords)


def warn_of_fallback(reason: str) -> None:
    """Say that the planner failed and that training goes on."""
    warn(
        f"the planner failed ({reason}); this graph runs with torch's own choice of saved tensors and no promise about its "
        "peak. Please report this."
    )


def warn(message: str) -> None:
    """A `PlannerWarning`: something is not as it was asked, and training goes on."""
    warnings.warn(f"compile_remat: {message}", PlannerWarning, stacklevel=3)
