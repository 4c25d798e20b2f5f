"""The device on which a model is to be trained, and its step there as a planning problem."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from compile_remat._torch import joint_graph
from compile_remat._torch.sizes import storage_nbytes
from compile_remat._util.collector import collector_paused
from compile_remat._util.frame_chunk import frames_in_one_chunk
from compile_remat.budget import MemoryBudget, OptimizerState, Reserve
from compile_remat.cost_models import Device, describe, load_device, share_spared_by_tf32
from compile_remat.device.free_memory import blas_bytes
from compile_remat.errors import RematError
from compile_remat.forecast.batch_scaling import TracedStep
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import Traced, refuse, trace
from compile_remat.passes import Link, Planner, Problem
from compile_remat.planning.joint_problem import PlanContext, PreparedGraph, prepare
from compile_remat.planning.request import Fit
from compile_remat.planning.settings import SLICES, Settings, host_link


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
        offload: The setting: `off` or `auto`.
        host_bytes: Bytes of host memory for it; None for no limit.
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
    offload: str = "off"
    host_bytes: int | None = None

    def figures(self) -> Device:
        """Returns the figures of the device."""
        return load_device(self.device)

    @property
    def limit_bytes(self) -> int | None:
        """Capacity less the reserve and cuBLAS's workspaces; None if the capacity is not known."""
        figures = self.figures()
        known = figures.memory_bytes if self.capacity_bytes is None else self.capacity_bytes
        return None if known is None else known - self.reserve.of(known) - blas_bytes(figures.blas_workspace_bytes)

    def settings(self, budget: MemoryBudget, *, from_auto: bool = False) -> Settings:
        """Returns the settings of training on the device, except for facts that need a kernel to run there."""
        figures = self.figures()
        return Settings(
            budget,
            figures,
            self.cost_model,
            from_auto=from_auto,
            time_limit=self.time_limit,
            is_here=figures.name == "cpu",
            slices=self.slices if isinstance(self.slices, int) else SLICES[self.slices],
            inputs_are_constant=self.inputs == "constant",
            link=self.link,
        )

    @property
    def link(self) -> Link | None:
        """Returns the way to host memory; None to move nothing, with a warning if the device's bandwidth is not known."""
        if self.offload == "off":
            return None
        return host_link(self.figures(), sys.maxsize if self.host_bytes is None else self.host_bytes)


WITHOUT_TF32 = (
    'float32 products are priced without TF32, as torch runs them; torch.set_float32_matmul_precision("high") allows it'
)
MUCH_SPARED = 0.1
"""Share of the step's time that TF32 has to spare for `WITHOUT_TF32` to be said."""

LOWEST_PEAK = MemoryBudget("min")


@dataclass(frozen=True)
class Ready:
    """A step that can be planned.

    Attributes:
        prepared: Its graph, with the problem in which budgets are searched.
        planner: A planner for that problem.
    """

    prepared: PreparedGraph
    planner: Planner
    input_bytes: int

    @property
    def problem(self) -> Problem:
        """The planning problem, in which torch's own plan is a candidate only if the budget asks for that."""
        return self.prepared.problem

    @property
    def with_torch(self) -> Problem:
        """The planning problem with torch's saved set as a candidate."""
        return self.prepared.with_torch

    @property
    def step(self) -> TracedStep:
        """The problem in which torch's own plan is no candidate, for other batches."""
        return TracedStep(replace(self.problem, reference=()), self.input_bytes, self.with_torch.reference)


@frames_in_one_chunk
@collector_paused()
def step_of(builder: Builder, target: Target) -> TracedStep:
    """Trace a step and build its planning problem."""
    return step_on(trace(builder, target.figures()), target)


def step_on(traced: Traced, target: Target) -> TracedStep:
    """Build the planning problem of a traced step, for any device of the kind for which it was traced."""
    return ready_on(traced, target).step


def ready_on(
    traced: Traced,
    target: Target,
    budget: MemoryBudget = LOWEST_PEAK,
    torch_budgets: tuple[float, ...] = (1.0,),
) -> Ready:
    """Make a traced step ready for planning on the target.

    Args:
        budget: The budget for whose search the graph is rewritten: under `max` as torch has it, else with convolutions split.
        torch_budgets: Budgets of torch's own chooser at which its saved values are looked up.

    Raises:
        RematError: Nothing in the graph has a gradient, or the gradients of this model cannot leave early.
    """
    context = context_of(traced, target, torch_budgets=torch_budgets)
    prepared = prepare(traced.copied(), target.settings(budget), Fit(), context)
    if prepared is None:
        refuse(0, traced.name)
    if prepared.late:
        raise RematError(f"gradients = early is off for this model: {prepared.late}")
    return Ready(prepared, Planner(prepared.problem, target.time_limit, link=target.link), traced.input_bytes)


def context_of(traced: Traced, target: Target, **facts: Any) -> PlanContext:
    """Returns the context in which a traced step is planned by rules.

    Args:
        facts: Other fields of the `PlanContext`.
    """
    is_cpu, is_early = target.figures().name == "cpu", target.gradients == "early"
    return PlanContext(
        has_deadline=False,
        early=tuple(joint_graph.gradient_nodes(traced.given.module)) if is_early else (),
        device=None if is_cpu else torch.device("cuda", 0),
        in_blocks=False,
        times_ns=traced.times_ns,
        **facts,
    )


def time_note(traced: Traced, target: Target) -> str:
    """Returns the assumption behind the times that one setting of torch would change much; empty if there is none."""
    nodes = traced.given.module.graph.nodes
    share = share_spared_by_tf32((describe(node) for node in nodes if node.op == "call_function"), target.figures())
    return WITHOUT_TF32 if share >= MUCH_SPARED else ""


def largest_gradient_bytes(traced: Traced) -> int:
    """Returns the bytes of the largest gradient that the step makes; 0 if it makes none."""
    made = joint_graph.gradient_nodes(traced.given.module).values()
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

    def named_bytes(self, parameter_bytes: int, input_bytes: int) -> dict[str, int]:
        """Returns names and bytes of what the device holds beside the graph all the time, its inputs included."""
        state_bytes = self.fixed_bytes - parameter_bytes
        return {"parameters": parameter_bytes, "optimizer state": state_bytes, "inputs": input_bytes}


def beside_graph(target: Target, parameter_bytes: int, trained_bytes: int, largest_bytes: int) -> BesideGraph:
    """Returns the bytes beside a graph from the bytes of all parameters, of trained ones, and of the largest trained one."""
    fixed_bytes = parameter_bytes + target.optimizer.of(trained_bytes)
    workspace_bytes = optimizer_workspace_bytes(target, trained_bytes, largest_bytes)
    if target.gradients == "early":
        return BesideGraph(fixed_bytes + workspace_bytes, 0)
    return BesideGraph(fixed_bytes, trained_bytes + workspace_bytes)
