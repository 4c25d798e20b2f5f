"""The device on which a model is to be trained, and its step there as a planning problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from compile_remat._torch import joint_graph
from compile_remat._torch.sizes import storage_nbytes
from compile_remat._util.collector import collector_paused
from compile_remat._util.frame_chunk import frames_in_one_chunk
from compile_remat.budget import MemoryBudget, OptimizerState, Reserve
from compile_remat.cost_models import CostModel, Device, Profile, load_device, make_cost_model
from compile_remat.device.free_memory import blas_bytes
from compile_remat.errors import RematError
from compile_remat.forecast.batch_scaling import TracedStep
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import Traced, trace
from compile_remat.inductor.workspace import node_workspace_bytes
from compile_remat.passes import Planner, Problem, ProblemBuilder, mark_gradients, split_convolution_gradients


@dataclass(frozen=True)
class Target:
    """The device on which a model is to be trained, and the settings of training.

    Attributes:
        device: A name of the device table or a JSON file.
        budget: Budget of the region peak; `auto` is the memory that the device has left.
        capacity_bytes: Bytes of the device that may be used; None for all of its memory.
        gradients: The setting: `end` or `early`.
        slices: The setting: `off`, `auto` or a number.
        inputs: The setting: `as_plain` or `constant`.
        time_limit: Work of one search for a plan, in counted seconds; None for a limit by the size of the graph.
        estimate: True to plan by rules even if the plan's graphs could be lowered (`lowering`).
    """

    device: str
    budget: MemoryBudget = MemoryBudget("auto")
    optimizer: OptimizerState = OptimizerState("adamw")
    reserve: Reserve = Reserve("percent", 5)
    cost_model: str = "roofline"
    capacity_bytes: int | None = None
    time_limit: float | None = None
    gradients: str = "end"
    slices: str | int = "off"
    inputs: str = "as_plain"
    estimate: bool = False

    def figures(self) -> Device:
        """Returns the figures of the device."""
        return load_device(self.device)

    @property
    def limit_bytes(self) -> int | None:
        """Capacity less the reserve and cuBLAS's workspaces; None if the capacity is not known."""
        figures = self.figures()
        known = figures.memory_bytes if self.capacity_bytes is None else self.capacity_bytes
        return None if known is None else known - self.reserve.of(known) - blas_bytes(figures.blas_workspace_bytes)


@frames_in_one_chunk
@collector_paused()
def step_of(builder: Builder, target: Target) -> TracedStep:
    """Trace a step and build its planning problem."""
    return step_on(trace(builder, target.figures()).cut_off(target.inputs), target)


def step_on(traced: Traced, target: Target) -> TracedStep:
    """Build the planning problem of a traced step, for any device of the kind for which it was traced."""
    return ready_on(traced, target, {}).step


def ready_on(traced: Traced, target: Target, torch_sets: dict[str, list[Any]]) -> Ready:
    """Make a traced step ready for planning on the target; torch's saved set is no candidate, see `ready`."""
    traced.place(target.figures())
    split_convolution_gradients(traced.joint)
    if target.gradients == "early":
        traced = with_early_gradients(traced)
    return ready(traced, target, torch_sets, is_candidate=False)


def with_early_gradients(traced: Traced) -> Traced:
    """Returns the step with gradients that leave the backward once computed; rewrites its graph in place.

    Raises:
        RematError: The gradients of this model cannot leave early.
    """
    joint, why_not = mark_gradients(traced.joint, joint_graph.gradient_nodes(traced.joint.module))
    if why_not:
        raise RematError(f"gradients = early is off for this model: {why_not}")
    return replace(traced, joint=joint)


def largest_gradient_bytes(traced: Traced) -> int:
    """Returns the bytes of the largest gradient that the step makes; 0 if it makes none."""
    made = joint_graph.gradient_nodes(traced.joint.module).values()
    return max((storage_nbytes(node.meta["val"]) for node in made), default=0)


def optimizer_workspace_bytes(target: Target, trained_bytes: int, largest_bytes: int) -> int:
    """Returns the workspace of the optimizer's step: for all parameters at once on a GPU; for the largest one on a CPU, and with
    early gradients, where each parameter is stepped as soon as it has its gradient.

    Args:
        trained_bytes: Bytes of all parameters that are trained.
        largest_bytes: Bytes of the largest such parameter.
    """
    if target.gradients == "early" or target.figures().name == "cpu":
        return target.optimizer.workspace_of(largest_bytes)
    return target.optimizer.foreach_workspace_of(trained_bytes)


@dataclass(frozen=True)
class BesideGraph:
    """Bytes that a device holds beside the graph of a step and its inputs.

    Attributes:
        fixed_bytes: Held all the time: parameters, optimizer state, and the workspace of an optimizer that steps in the backward.
        at_end_bytes: Held after the backward, instead of the graph: gradients, and the workspace of the optimizer's step.
    """

    fixed_bytes: int
    at_end_bytes: int


def beside_graph(target: Target, parameter_bytes: int, trained_bytes: int, largest_bytes: int) -> BesideGraph:
    """Returns the bytes beside a graph from the bytes of all parameters, of trained ones, and of the largest trained one."""
    fixed_bytes = parameter_bytes + target.optimizer.of(trained_bytes)
    workspace_bytes = optimizer_workspace_bytes(target, trained_bytes, largest_bytes)
    if target.gradients == "early":
        return BesideGraph(fixed_bytes + workspace_bytes, 0)
    return BesideGraph(fixed_bytes, trained_bytes + workspace_bytes)


@dataclass(frozen=True)
class Ready:
    """A step that can be planned.

    Attributes:
        with_torch: Its problem with torch's saved set as a candidate.
        references: Indices of the values that each of torch's saved sets has, by name of the set.
    """

    step: TracedStep
    planner: Planner
    with_torch: Problem
    references: dict[str, tuple[int, ...]]


def ready(traced: Traced, target: Target, torch_sets: dict[str, list[Any]], *, is_candidate: bool) -> Ready:
    """Build the problem of the graph as it is now; its planner may choose torch's first saved set only if `is_candidate`."""
    builder = _builder(traced, target)
    step = TracedStep(builder.build(), traced.input_bytes)
    references = {name: builder.saved_by(nodes, step.problem) for name, nodes in torch_sets.items()}
    step = replace(step, reference=next(iter(references.values()), ()))
    with_torch = step.with_torch
    problem = with_torch if is_candidate else step.problem
    return Ready(step, Planner(problem, target.time_limit), with_torch, references)


def _builder(traced: Traced, target: Target) -> ProblemBuilder:
    device = target.figures()
    workspace = node_workspace_bytes if device.name == "cpu" else (lambda node, rules: 0)
    cost: CostModel = make_cost_model(target.cost_model, device)
    if traced.times_ns:
        cost = Profile(cost, traced.times_ns)
    return ProblemBuilder(traced.joint, cost, workspace, in_blocks=False)
