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

from compile_remat._torch import cache_key_text, joint_graph
from compile_remat._torch.version import version_problem
from compile_remat._util.atomic_write import write_atomically
from compile_remat._util.units import format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import CostModel, Device, OpKind, Times, load_device, make_cost_model, tf32_kinds
from compile_remat.errors import PlanMismatchError, PlannerWarning, RematError, warn
from compile_remat.inductor.workspace import node_workspace_bytes
from compile_remat.passes import (
    CLOCK,
    MUST,
    Plan,
    Planner,
    Problem,
    Status,
    build_problem,
    extract,
    must_be_saved,
    obeying,
    prepared,
)
from compile_remat.planning import op_timing
from compile_remat.planning.deadline import StoppedByClock, clock_of, explaining, noted
from compile_remat.planning.plan_policy import (
    Asked,
    asked_of,
    bytes_of,
    choose,
    choose_below,
    choose_shared,
    replayed,
)
from compile_remat.planning.request import (
    ChosenPlan,
    Fit,
    FitBelow,
    Replay,
    Request,
    Resume,
    SharedOption,
    interrupted_by,
)
from compile_remat.report import Report, record

LOG = logging.getLogger("compile_remat")


@dataclass(frozen=True)
class Settings:
    """What planning needs of the configuration, with everything looked up.  Constant while a graph is compiled.

    Attributes:
        budget: Never `auto`: that has become bytes or `max`.
        from_auto: Whether it was; then a budget below the floor takes the lowest plan with a warning.
        is_given: Whether the user set `memory_budget`; else torch's own ratios hold where there are any.
        torch_ratio: ``torch._functorch.config.activation_memory_budget`` when the settings were looked up.
        device: Figures that the cost model prices with.
        tf32: Kinds of operators that torch lets run in TF32: they are priced so.
        plan_dir: Where plans are pinned.
        times: Measured times of the graph's operators, for the cost model `profile`.
        time_limit: Work of one search for a plan, in counted seconds; None goes by the size of the graph.
    """

    budget: MemoryBudget
    device: Device
    cost_model: str = "roofline"
    from_auto: bool = False
    plan_dir: str | None = None
    tf32: tuple[OpKind, ...] = field(default_factory=tf32_kinds)
    is_given: bool = True
    torch_ratio: float = 1.0
    times: Times = Times()
    time_limit: float | None = None

    def has_limit(self, graph: fx.GraphModule) -> bool:
        """Whether a peak must be kept: a budget other than `max`, or a ratio of torch's that stands in for one."""
        by_ratio = not self.is_given and (self.torch_ratio < 1 or joint_graph.annotated_ratios(graph).any)
        return self.budget.kind != "max" or by_ratio

    def workspace(self, node: fx.Node) -> int:
        """Bytes that a node's kernel takes for itself; known for CPUs alone, where they depend on the number of threads."""
        return node_workspace_bytes(node) if self.device.name == "cpu" else 0

    def cost(self, graph: fx.Graph) -> CostModel:
        """The cost model for the device, with what was measured of the graph's operators."""
        return make_cost_model(self.cost_model, self.device, self.tf32, self.times.of_nodes(graph.nodes))


class PlannerFailed(Exception):
    """The planner broke on a graph; carries the reason to whoever can enter torch again."""


@dataclass(frozen=True)
class Planned:
    """A plan with the graph it belongs to.

    Attributes:
        resume: The request that takes this plan as it is, where the deadline has just ended the search for it.
    """

    joint: joint_graph.Joint
    cost: CostModel
    problem: Problem
    plan: Plan
    report: Report
    resume: Resume | None = None


def plan_joint(
    joint_module: fx.GraphModule,
    settings: Settings,
    request: Request,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    has_deadline: bool = True,
) -> Planned | None:
    """Plan one joint graph; None where nothing depends on a tangent, so that there is nothing to choose.

    Args:
        has_deadline: Whether a deadline may end the search; not where the caller could not compile once more.

    Raises:
        BudgetError: No plan fits the budget.
        ConfigError: Torch's annotations of a memory budget contradict each other.
        PlanMismatchError: `plan_dir` holds a plan under this graph's name that does not fit it.
    """
    start = time.perf_counter()
    joint = prepared(
        joint_module,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=static_lifetime_input_indices,
    )
    if not joint.has_backward:
        return None
    asked = asked_of(
        joint,
        settings.budget,
        is_given=settings.is_given,
        from_auto=settings.from_auto,
        ratio=settings.torch_ratio,
    )
    reference = joint_graph.torch_choice(joint) if asked.budget.kind == "max" else ()
    cost = settings.cost(joint.module.graph)
    problem = build_problem(joint, cost=cost, reference=reference, workspace=settings.workspace)
    clock = clock_of(problem, settings.time_limit) if has_deadline else None
    planner = Planner(problem, settings.time_limit, clock)
    request_now = interrupted_by(request)
    budget_bytes = None if isinstance(request_now, SharedOption | Replay) else bytes_of(planner, asked)
    if isinstance(request, Resume) and request.problem_key != problem.key():
        request = request_now  # another graph of the compilation
    choice = _chosen(planner, request, asked, settings, budget_bytes)
    plan = replace(choice.plan, budget_bytes=budget_bytes)
    resume = Resume(request_now, problem.key(), choice) if CLOCK in planner.ends else None
    if resume is None and isinstance(request, Fit | FitBelow) and plan.status is not Status.REPLAYED:
        _store_plan(plan, settings)
    seconds = time.perf_counter() - start
    report = Report(
        plan.problem_key, str(asked.budget), plan.budget_bytes, plan, choice.floor_bytes, seconds, choice.message
    )
    report = replace(report, offers=choice.offers, estimated_ops=problem.estimated)
    return Planned(joint, cost, problem, plan, report, resume)


def _chosen(
    planner: Planner, request: Request, asked: Asked, settings: Settings, budget_bytes: int | None
) -> ChosenPlan:
    """The plan that a request asks for; one that was searched for has a message where the search ended early."""
    with explaining(planner):
        match request:
            case Resume():
                return request.incumbent
            case Replay():
                choice = replayed(planner, request)
            case SharedOption():
                choice = choose_shared(planner, request, asked)
            case FitBelow():
                choice = choose_below(planner, asked, request.target_bytes)
            case Fit():
                pinned = _stored_plan(planner, settings, budget_bytes)
                if pinned is not None:
                    return pinned
                choice = choose(planner, asked)
    return noted(choice, planner)


# -- plans on disk ----------------------------------------------------------------------------------------------------


def _plan_path(key: str, settings: Settings) -> Path | None:
    return None if settings.plan_dir is None else Path(settings.plan_dir) / f"{key}.plan.json"


def _stored_plan(planner: Planner, settings: Settings, budget_bytes: int | None) -> ChosenPlan | None:
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
        lenient = planner.on(obeying(planner.problem, MUST))  # a stored plan may have set aside what the others prefer
        plan = lenient.plan_of(lenient.mask_of(stored.saved), budget_bytes, stored.again)
    except KeyError as error:
        raise PlanMismatchError(f"{path} saves {error}, which this graph does not have.") from None
    except ValueError as error:
        raise PlanMismatchError(f"{path} does not fit this graph: {error}.") from None
    plan = replace(plan, problem_key=key, status=Status.REPLAYED)
    if budget_bytes is None or plan.is_feasible:
        return ChosenPlan(plan)
    message = (
        f"the pinned plan {path} has a predicted peak of {format_bytes(plan.peak_bytes)}, above the budget of "
        f"{format_bytes(budget_bytes)}; delete it to have a new plan written"
    )
    warn(message)
    return ChosenPlan(plan, message=message)


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
    request: Request,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    is_cached: bool = False,
    has_deadline: bool = True,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Plan and extract.  What breaks in the planner becomes `PlannerFailed`; a `RematError` passes.

    Args:
        is_cached: Whether torch stores what is returned in its cache.
        has_deadline: See `plan_joint`.

    Raises:
        StoppedByClock: The clock stopped the planning, and torch would keep the plan.
    """
    start = time.perf_counter()
    try:
        planned = plan_joint(
            joint_module,
            settings,
            request,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
            has_deadline=has_deadline,
        )
        if planned is not None:
            if is_cached and planned.resume is not None:
                raise StoppedByClock(planned.resume)
            modules = extract(planned.joint, planned.plan)
    except (RematError, StoppedByClock):
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
        joint = prepared(joint_module, **keywords)
        if joint.has_backward:
            saved = list(
                dict.fromkeys(
                    [*joint_graph.torch_choice(joint), *must_be_saved(joint), *joint_graph.forward_only(joint)]
                )
            )
            modules = joint_graph.extract_modules(joint, saved)
            _record_fallback(joint_module, settings, message, _describe(joint, saved, settings))
            return modules
    except Exception:
        LOG.warning("the fallback failed as well (after: %s); torch's own partition takes over", reason, exc_info=True)
        _record_fallback(joint_module, settings, f"{message}, in torch's own partition")
    return joint_graph.torch_partition(joint_module, joint_inputs, **keywords)


def _describe(joint: joint_graph.Joint, saved: Sequence[fx.Node], settings: Settings) -> Plan | None:
    """What saving these nodes comes to; None where that breaks what broke the planner."""
    try:
        cost = settings.cost(joint.module.graph)
        planner = Planner(build_problem(joint, cost=cost, reference=saved, workspace=node_workspace_bytes))
        return replace(planner.torchs_own(bytes_of(planner, Asked(settings.budget))), status=Status.FALLBACK)
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
        memory_budget: Any form but `auto`, which needs a device to look at.  Where it is None, torch's own
            ``activation_memory_budget`` holds if it is set, as a fraction; else `max`.
        device: A name of the device table or a JSON file, for the cost model.

    Raises:
        BudgetError: No plan fits; ConfigError, DeviceError: a setting is off.
    """
    budget = MemoryBudget("max") if memory_budget is None else MemoryBudget.parse(memory_budget)
    times = op_timing.times_of(joint_module.graph) if cost_model == "profile" else Times()
    settings = Settings(
        MemoryBudget("max") if budget.kind == "auto" else budget,
        load_device(device),
        cost_model,
        is_given=memory_budget is not None,
        torch_ratio=joint_graph.config_ratio(),
        times=times,
    )
    keywords: dict[str, Any] = {
        "num_fwd_outputs": num_fwd_outputs,
        "static_lifetime_input_indices": static_lifetime_input_indices,
    }
    if problem := version_problem():
        warnings.warn(f"{problem}: torch's own partition takes this graph", PlannerWarning, stacklevel=2)
        return joint_graph.torch_partition(joint_module, joint_inputs, **keywords)
    try:
        return split(joint_module, joint_inputs, settings, Fit(), **keywords)
    except PlannerFailed as error:
        warn_of_fallback(str(error))
        return split_without_planner(joint_module, joint_inputs, settings, str(error), **keywords)


def warn_of_fallback(reason: str) -> None:
    """Say that the planner failed and that training goes on."""
    warn(
        f"the planner failed ({reason}); this graph runs with torch's own choice of saved tensors and no promise about its "
        "peak. Please report this."
    )
