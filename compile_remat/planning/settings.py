"""What planning needs of the configuration, looked up on this machine: the device's figures, the bytes behind `auto`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from compile_remat._torch import joint_graph, sizes
from compile_remat._torch.codegen_rules import RulesOf
from compile_remat._util.size_range import Sizes
from compile_remat.budget import MemoryBudget
from compile_remat.config import RematConfig
from compile_remat.cost_models import (
    CostModel,
    Device,
    OpKind,
    Times,
    detect,
    device_names,
    load_device,
    make_cost_model,
    tf32_kinds,
)
from compile_remat.device import free_memory
from compile_remat.errors import ConfigError, RematError
from compile_remat.inductor.workspace import node_workspace_bytes
from compile_remat.planning import op_timing
from compile_remat.planning.plain_peaks import largest_plain_bytes
from compile_remat.ranks.agreement import Agreement, agreed_again
from compile_remat.ranks.wrappers import held_by_running

LOG = logging.getLogger("compile_remat")

SLICES = {"off": 1, "auto": 0}
"""Numbers that stand for words in `Settings.slices`."""


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
        is_here: Whether the graph runs on this device; else the plan is for another one, whose kernels cannot be measured.
        slices: In how many slices the rows of the largest temporaries are computed; 1: none, 0: as many as the budget needs.
        inputs_are_constant: Whether nothing that a graph reads from outside changes until its backward has run; else a backward
            reads only those inputs that the backward of plain torch.compile reads.
        expandable: Whether torch's CUDA allocator has expandable segments.
        plain_bytes: Where the budget is a fraction, the largest peak of plain torch.compile that the process has shown so far.
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
    plain_bytes: int = 0
    is_here: bool = True
    slices: int = 1
    inputs_are_constant: bool = False
    expandable: bool = field(default_factory=free_memory.has_expandable_segments)

    def has_limit(self, graph: fx.GraphModule) -> bool:
        """Whether a peak must be kept: a budget other than `max`, or a ratio of torch's that stands in for one."""
        by_ratio = not self.is_given and (self.torch_ratio < 1 or joint_graph.annotated_ratios(graph).any)
        return self.budget.kind != "max" or by_ratio

    def asks_for_plain(self, graph: fx.GraphModule) -> bool:
        """Whether the budget is a fraction of what plain torch.compile takes: the user's, or a ratio of torch's."""
        if self.is_given:
            return self.budget.kind == "fraction"
        annotated = joint_graph.annotated_ratios(graph)
        ratios = annotated.ratios or (self.torch_ratio if annotated.legacy is None else annotated.legacy,)
        return any(0 < ratio < 1 for ratio in ratios)

    def workspace(self, node: fx.Node, rules: RulesOf) -> int:
        """Bytes that a node's kernel takes beside its outputs, measured; 0 where the plan is for a device that is not here.

        Args:
            rules: Of the node's graph, which say how convolutions lie.
        """
        place = place_of([n.meta.get("val") for n in (node, *node.all_input_nodes)])
        is_on_device = (place.type == "cpu") == self.is_for_cpu
        return node_workspace_bytes(node, rules) if self.is_here and is_on_device else 0

    @property
    def is_for_cpu(self) -> bool:
        """Whether Inductor makes C++ for the device."""
        return self.device.name == "cpu"

    def cost(self, graph: fx.Graph) -> CostModel:
        """The cost model for the device, with what was measured of the graph's operators."""
        return make_cost_model(self.cost_model, self.device, self.tf32, self.times.of_nodes(graph.nodes))


def settings_for(config: RematConfig, example_inputs: Sequence[Any], agreement: Agreement | None = None) -> Settings:
    """Look up what the settings stand for on this machine: the device's figures and the bytes behind `auto`.

    Args:
        agreement: Of the ranks that compile this graph, which take the smallest bytes of all; None: this process's own.

    Raises:
        RankError: A rank has failed.
    """
    place = place_of(example_inputs)
    device = detect(place) if config.device == "detect" else load_device(config.device)
    if config.cost_model == "profile":
        _check_is_here(config.device, device, place)
    budget, from_auto = config.memory_budget, config.memory_budget.kind == "auto"
    gradient_bytes = free_memory.trainable_bytes(example_inputs)
    if from_auto:
        held = held_by_running()
        others_bytes = state_bytes(config, example_inputs) + (0 if held is None else held.coming_bytes)
        others_bytes += free_memory.blas_bytes(device.blas_workspace_bytes)
        others_bytes += hook_workspace_bytes(config, example_inputs)
        smallest = None if agreement is None else agreement.smallest
        budget = auto_budget(config, place, others_bytes, smallest, gradient_bytes)
    elif budget.kind == "bytes" and LOG.isEnabledFor(logging.INFO):
        memory = free_memory.read(place, config.capacity)
        LOG.info("%s", free_memory.describe(memory, int(budget.value or 0), gradient_bytes))
    settings = Settings(
        budget,
        device,
        config.cost_model,
        from_auto,
        config.plan_dir,
        is_given=config.memory_budget.is_given,
        torch_ratio=joint_graph.config_ratio(),
        time_limit=config.time_limit,
        is_here=config.device == "detect" or device.name == detect(place).name,
        slices=config.slices if isinstance(config.slices, int) else SLICES[config.slices],
        inputs_are_constant=config.inputs == "constant",
    )
    return with_plain_bytes(settings)


def with_plain_bytes(settings: Settings) -> Settings:
    """The settings with what the process has shown by now, where the budget is a fraction."""
    if settings.budget.kind != "fraction":
        return settings
    return replace(settings, plain_bytes=largest_plain_bytes(settings.device.name))


def settings_or_failure(
    config: RematConfig, example_inputs: Sequence[Any], agreement: Agreement | None = None
) -> tuple[Settings, str]:
    """Settings, and why the machine could not be asked for them; a setting that is off is an error all the same."""
    try:
        return settings_for(config, example_inputs, agreement), ""
    except RematError:
        raise
    except Exception as error:
        budget = MemoryBudget("max") if config.memory_budget.kind == "auto" else config.memory_budget
        return Settings(budget, load_device("cpu")), f"{type(error).__name__}: {error}"


def priced(
    settings: Settings,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    patches: Mapping[str, Any],
    agreement: Agreement | None = None,
) -> Settings:
    """The settings with measured times of the graph's operators, where `cost_model` asks for them.

    Args:
        patches: Inductor's options, which the joint graph depends on.
        agreement: Of the ranks that compile this graph, which take the times of rank 0; None: this process's own.
    """
    if config.cost_model != "profile":
        return settings
    times = op_timing.times_for(gm, example_inputs, place_of(example_inputs), patches, config.compiler, agreement)
    return replace(settings, times=times)


def _check_is_here(given: str, device: Device, place: torch.device) -> None:
    """A file may hold what `calibrate` measured here; a name of the table must be that of this device."""
    if given in device_names() and device.name != detect(place).name:
        raise ConfigError(
            f"cost_model = 'profile' times operators on the device that is here ({detect(place).name}), and "
            f"device = {given!r} is another one. Leave device out, or take cost_model = 'roofline'."
        )


Smallest = Callable[[int | None, str], int | None]
"""From this rank's figure and what it belongs to, to the smallest of all ranks."""


def auto_budget(
    config: RematConfig,
    place: torch.device,
    others_bytes: int,
    smallest: Smallest | None = None,
    gradient_bytes: int = 0,
) -> MemoryBudget:
    """What is free on the device, in bytes, less what is still to come beside the graphs; `max` where that is not known.

    Args:
        smallest: Asks the other ranks, which all get the same figure; None where this process is asked alone.
        gradient_bytes: For the log: what an earlier micro-batch would leave, where none has.
    """
    free = free_memory.read(place, config.capacity)
    budget_bytes = None if free is None else free_memory.auto_budget_bytes(free, config.reserve, others_bytes)
    if smallest is not None:
        budget_bytes = smallest(budget_bytes, f"{place.type} {config.memory_budget}")
    if free is not None and budget_bytes is not None:
        LOG.info("%s", free_memory.describe(free, budget_bytes, gradient_bytes))
    return MemoryBudget("max") if budget_bytes is None else MemoryBudget("bytes", budget_bytes)


def hook_workspace_bytes(config: RematConfig, example_inputs: Sequence[Any]) -> int:
    """What hooks take beside the graph that step each parameter when its gradient leaves early."""
    if config.gradients == "end":
        return 0
    return config.optimizer_state.workspace_of(free_memory.largest_trainable_bytes(example_inputs))


def state_bytes(config: RematConfig, example_inputs: Sequence[Any]) -> int:
    """Returns the bytes that the optimizer allocates for the parameters that train, by `optimizer_state`."""
    held = held_by_running()
    return config.optimizer_state.of(
        free_memory.trainable_bytes(example_inputs) if held is None else held.trainable_bytes
    )


@dataclass(frozen=True)
class LaterAuto:
    """Returns what `auto` comes to when the second step begins, where it is called: the smallest figure of all ranks.

    Gradients that lie there by then stay there while the step runs: it is the second micro-batch of several, or gradients are set
    to zero and not to None.  They are allocated, so they are not free.  While the first ones are accumulated, the optimizer has not
    stepped: its state is to come, less what has come beside gradients.

    Attributes:
        place: The device.
        allocated_bytes: Allocated there beside gradients when the budget was read first, with cuBLAS's workspaces.
        state_bytes: See `state_bytes`.
        workspace_bytes: See `hook_workspace_bytes`.
    """

    config: RematConfig
    place: torch.device
    allocated_bytes: int
    state_bytes: int
    workspace_bytes: int

    @staticmethod
    def after(config: RematConfig, device: Device, example_inputs: Sequence[Any]) -> LaterAuto:
        """The same behind a first reading, which is now."""
        place = place_of(example_inputs)
        memory = free_memory.read(place, config.capacity)
        allocated_bytes = free_memory.blas_bytes(device.blas_workspace_bytes) - free_memory.gradient_bytes(
            example_inputs
        )
        allocated_bytes += 0 if memory is None else memory.allocated
        coming, workspace = state_bytes(config, example_inputs), hook_workspace_bytes(config, example_inputs)
        return LaterAuto(config, place, allocated_bytes, coming, workspace)

    def __call__(self, gradient_bytes: int) -> MemoryBudget:
        """Read it; `gradient_bytes` of gradients lie there."""

        def smallest(nbytes: int | None, setting: str) -> int | None:
            return agreed_again(nbytes, setting, self.config.rank_timeout)

        held, memory = held_by_running(), free_memory.read(self.place, self.config.capacity)
        risen_bytes = 0 if memory is None else memory.allocated - gradient_bytes - self.allocated_bytes
        others_bytes = max(0, self.state_bytes - max(0, risen_bytes))
        others_bytes += self.workspace_bytes + (0 if held is None else held.coming_bytes)
        return auto_budget(self.config, self.place, others_bytes, smallest)


def place_of(example_inputs: Sequence[Any]) -> torch.device:
    """The accelerator among the devices of a graph's inputs, or the CPU."""
    devices = [t.device for t in example_inputs if isinstance(t, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def sizes_of(example_inputs: Sequence[Any]) -> Sizes:
    """The symbols among a graph's inputs, with the sizes that they stand for; jagged ones stand for no number."""
    symbols = (s for s in example_inputs if isinstance(s, torch.SymInt) and not sizes.is_jagged(s))
    return tuple((str(s), sizes.hint_int(s)) for s in symbols)


def positions_of(example_inputs: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """The symbols among a graph's inputs and their places."""
    return tuple((str(s), k) for k, s in enumerate(example_inputs) if isinstance(s, torch.SymInt))
