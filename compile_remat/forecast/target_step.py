"""Where a model is to be trained, and its step there as a planning problem."""

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
    """Where a model is to be trained, and how.

    Attributes:
        device: A name of the device table or a JSON file.
        budget: Of the region peak; `auto` is what the device has left.
        capacity_bytes: What may be used of the device; None for all of it.
        gradients: `end` or `early`, as the setting.
        slices: `off`, `auto` or a number, as the setting.
        inputs: `as_plain` or `constant`, as the setting.
        time_limit: Work of one search for a plan, in counted seconds; None goes by the size of the graph.
        estimate: Whether the plan is made by rules, also where its graphs could be lowered (`lowering`).
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
        """The device's."""
        return load_device(self.device)

    @property
    def limit_bytes(self) -> int | None:
        """Capacity less the reserve and cuBLAS's workspaces; None where the capacity is not known."""
        figures = self.figures()
        known = figures.memory_bytes if self.capacity_bytes is None else self.capacity_bytes
        return None if known is None else known - self.reserve.of(known) - blas_bytes(figures.blas_workspace_bytes)


@frames_in_one_chunk
@collector_paused()
def step_of(builder: Builder, target: Target) -> TracedStep:
    """Trace a step and make it the problem that plans for budgets are searched in."""
    return step_on(trace(builder, target.figures()).cut_off(target.inputs), target)


def step_on(traced: Traced, target: Target) -> TracedStep:
    """The same of a step that is traced, for any device of the kind that it was traced for."""
    return ready_on(traced, target, {}).step


def ready_on(traced: Traced, target: Target, torch_sets: dict[str, list[Any]]) -> Ready:
    """The same with a planner; what torch saves is no candidate, see `ready`."""
    traced.place(target.figures())
    split_convolution_gradients(traced.joint)
    if target.gradients == "early":
        traced = with_early_gradients(traced)
    return ready(traced, target, torch_sets, is_candidate=False)


def with_early_gradients(traced: Traced) -> Traced:
    """The step with gradients that leave the backward when they are made; its graph is rewritten in place."""
    joint, why_not = mark_gradients(traced.joint, joint_graph.gradient_nodes(traced.joint.module))
    if why_not:
        raise RematError(f"gradients = early is off for this model: {why_not}")
    return replace(traced, joint=joint)


def largest_gradient_bytes(traced: Traced) -> int:
    """Bytes of the largest gradient that the step makes."""
    made = joint_graph.gradient_nodes(traced.joint.module).values()
    return max((storage_nbytes(node.meta["val"]) for node in made), default=0)


def optimizer_workspace_bytes(target: Target, trained_bytes: int, largest_bytes: int) -> int:
    """What the optimizer's step takes for itself: for all parameters at once on a GPU, for one after the other on a CPU, and where
    each is stepped as soon as it has its gradient.

    Args:
        trained_bytes: Of all parameters that are trained.
        largest_bytes: Of the largest of them.
    """
    if target.gradients == "early" or target.figures().name == "cpu":
        return target.optimizer.workspace_of(largest_bytes)
    return target.optimizer.foreach_workspace_of(trained_bytes)


@dataclass(frozen=True)
class BesideGraph:
    """What a device holds beside the graph of a step, its inputs not counted.

    Attributes:
        fixed_bytes: All the time: parameters, optimizer state, and what an optimizer takes that steps during the backward.
        at_end_bytes: Behind the backward, in its place: gradients, and what the optimizer's step takes for itself.
    """

    fixed_bytes: int
    at_end_bytes: int


def beside_graph(target: Target, parameter_bytes: int, trained_bytes: int, largest_bytes: int) -> BesideGraph:
    """The same of a model, from the bytes of its parameters, of those that are trained, and of the largest of these."""
    fixed_bytes = parameter_bytes + target.optimizer.of(trained_bytes)
    workspace_bytes = optimizer_workspace_bytes(target, trained_bytes, largest_bytes)
    if target.gradients == "early":
        return BesideGraph(fixed_bytes + workspace_bytes, 0)
    return BesideGraph(fixed_bytes, trained_bytes + workspace_bytes)


@dataclass(frozen=True)
class Ready:
    """A step that can be planned.

    Attributes:
        with_torch: Its problem with what torch saves as a candidate.
        references: Which of its values each of torch's sets saves, by name.
    """

    step: TracedStep
    planner: Planner
    with_torch: Problem
    references: dict[str, tuple[int, ...]]


def ready(traced: Traced, target: Target, torch_sets: dict[str, list[Any]], *, is_candidate: bool) -> Ready:
    """The graph as it is now, with a planner that may choose torch's first set (`is_candidate`) or does not know it."""
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
