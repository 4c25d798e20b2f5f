"""Resolves the configuration for planning on this machine: the device's figures, the bytes of `auto`."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from compile_remat._torch import joint_graph, sizes
from compile_remat._torch.codegen_rules import RulesOf
from compile_remat._util.host import host_free_bytes
from compile_remat._util.size_range import Sizes
from compile_remat._util.units import format_bytes
from compile_remat._util.user_pass import UserPass
from compile_remat.budget import MemoryBudget, Reserve
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
from compile_remat.errors import ConfigError, RematError, warn
from compile_remat.inductor.inductor_options import mode_options
from compile_remat.inductor.workspace import node_workspace_bytes
from compile_remat.passes import Link
from compile_remat.passes.search.offload.copies import LEAST_BYTES
from compile_remat.planning import op_timing
from compile_remat.planning.plain_peaks import largest_plain_bytes
from compile_remat.ranks.agreement import Agreement, agreed_again
from compile_remat.ranks.wrappers import held_by_running

LOG = logging.getLogger("compile_remat")

MOVES_NOTHING = "offload = auto moves nothing: "
"""Prefix of a warning; the reason follows."""

SHARES_BUDGET = f"{MOVES_NOTHING}the graph shares its budget with others"

_failed_copies: list[bool] = []

SLICES = {"off": 1, "auto": 0}
"""Values of `Settings.slices` for the words of the option `slices`."""


@dataclass(frozen=True)
class Settings:
    """The configuration as planning needs it, with everything looked up.  Constant while a graph is compiled.

    Attributes:
        budget: The budget; never `auto`, which has become bytes or `max`.
        from_auto: True if the setting was `auto`; then a budget below the minimum peak takes the lowest plan with a warning.
        is_given: True if the user set `memory_budget`; else torch's own ratios hold if there are any.
        torch_ratio: ``torch._functorch.config.activation_memory_budget`` when the settings were looked up.
        device: Figures that the cost model uses for prices.
        tf32: Kinds of operators that torch may run in TF32; they are priced as TF32.
        plan_dir: Folder of pinned plans.
        times: Measured times of the graph's operators, for the cost model `profile`.
        time_limit: Work of one search for a plan, in counted seconds; None for a limit by the size of the graph.
        is_here: True if the graph runs on this device; False if the plan is for another one, whose kernels cannot be measured.
        slices: Number of slices for the rows of the largest temporaries; 1: no slices, 0: as many as the budget needs.
        inputs_are_constant: True if no tensor that a graph reads from outside changes until its backward has run; else a backward
            reads only those inputs that the backward of plain torch.compile reads.
        expandable: True if torch's CUDA allocator has expandable segments.
        joint_passes: Passes of the user on the joint graph.
        link: The way to host memory for saved tensors; None to move nothing.
        moves_nothing: True if copies of this graph, or of any in this process, have failed: a pinned plan keeps what it moved, too.
        plain_bytes: The largest peak of plain torch.compile in this process so far; set only if the budget is a fraction.
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
    joint_passes: tuple[UserPass, ...] = ()
    link: Link | None = None
    moves_nothing: bool = False

    @property
    def can_be_cached(self) -> bool:
        """Returns True if a cache can tell graphs under these settings from others: every pass of the user has an identity."""
        return not without_identity(self.joint_passes)

    def has_limit(self, graph: fx.GraphModule) -> bool:
        """Returns True if the peak is limited: by a budget other than `max`, or by one of torch's ratios in its place."""
        by_ratio = not self.is_given and (self.torch_ratio < 1 or joint_graph.annotated_ratios(graph).any)
        return self.budget.kind != "max" or by_ratio

    def asks_for_plain(self, graph: fx.GraphModule) -> bool:
        """Returns True if the budget is a fraction of plain torch.compile's peak: the user's fraction, or one of torch's ratios."""
        if self.is_given:
            return self.budget.kind == "fraction"
        annotated = joint_graph.annotated_ratios(graph)
        ratios = annotated.ratios or (self.torch_ratio if annotated.legacy is None else annotated.legacy,)
        return any(0 < ratio < 1 for ratio in ratios)

    def workspace(self, node: fx.Node, rules: RulesOf) -> int:
        """Returns the measured workspace of a node's kernel in bytes; 0 if the plan is for a device that is not here.

        Args:
            rules: Codegen rules of the node's graph, which determine the layout of convolutions.
        """
        place = place_of([n.meta.get("val") for n in (node, *node.all_input_nodes)])
        is_on_device = (place.type == "cpu") == self.is_for_cpu
        return node_workspace_bytes(node, rules) if self.is_here and is_on_device else 0

    @property
    def is_for_cpu(self) -> bool:
        """Returns True if Inductor emits C++ for the device."""
        return self.device.name == "cpu"

    def cost(self, graph: fx.Graph) -> CostModel:
        """Returns the cost model for the device, with the measured times of the graph's operators."""
        return make_cost_model(self.cost_model, self.device, self.tf32, self.times.of_nodes(graph.nodes))


def settings_for(config: RematConfig, example_inputs: Sequence[Any], agreement: Agreement | None = None) -> Settings:
    """Resolve the configuration on this machine: the device's figures and the bytes of `auto`.

    Args:
        agreement: Agreement of the ranks that compile this graph on the smallest budget; None for this process's own budget.

    Raises:
        RankError: A rank has failed.
    """
    place = place_of(example_inputs)
    device = detect(place) if config.device == "detect" else load_device(config.device)
    if config.cost_model == "profile":
        _check_is_here(config.device, device, place)
    link = link_of(config, device)
    of_hosts = (
        None if config.offload == "off" else agreement
    )  # a question waits for all ranks: whoever moves nothing asks none
    if of_hosts is not None:
        of_hosts.offer_host(0 if link is None else link.host_bytes)
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
    elif gradient_bytes and budget.kind != "bytes":
        LOG.info("budget %s%s", budget, free_memory.on_top(gradient_bytes))
    settings = Settings(
        budget,
        device,
        config.cost_model,
        from_auto,
        _plan_dir(config),
        is_given=config.memory_budget.is_given,
        torch_ratio=joint_graph.config_ratio(),
        time_limit=config.time_limit,
        is_here=config.device == "detect" or device.name == detect(place).name,
        slices=config.slices if isinstance(config.slices, int) else SLICES[config.slices],
        inputs_are_constant=config.inputs == "constant",
        joint_passes=config.joint_passes or (),
        link=_agreed(link, of_hosts),
    )
    return without_failed_copies(with_plain_bytes(settings))


def stop_offload() -> None:
    """Let plans that are made from now on move nothing, as a copy has failed; until the process's state is cleared."""
    _failed_copies.append(True)


def allow_offload() -> None:
    """Forget that a copy has failed."""
    _failed_copies.clear()


def without_failed_copies(settings: Settings) -> Settings:
    """Returns the settings; after `stop_offload`, those that move nothing."""
    return replace(settings, link=None, moves_nothing=True) if _failed_copies else settings


def link_of(config: RematConfig, device: Device) -> Link | None:
    """Returns the way to host memory; None with ``offload = off``, and, with a warning, where nothing can be moved.

    Raises:
        ConfigError: `host_memory` is more than the host has free.
    """
    if not offloads(config):
        return None
    reason = _why_nothing_moves(config)
    if reason:
        warn(f"{MOVES_NOTHING}{reason}")
        return None
    most_bytes = host_bytes(config.host_memory)
    if most_bytes < LEAST_BYTES:
        smallest = f"tensors below {format_bytes(LEAST_BYTES)} stay"
        warn(f"{MOVES_NOTHING}host_memory = {config.host_memory} is {format_bytes(most_bytes)}, and {smallest}")
        return None
    return host_link(device, most_bytes)


def _agreed(link: Link | None, agreement: Agreement | None) -> Link | None:
    """Returns the link with the smallest host memory of all ranks, so that their plans are equal.

    Returns None, with a warning, if another rank can move nothing.

    Args:
        agreement: None if there are no other ranks to ask.
    """
    nbytes = None if agreement is None else agreement.smallest_host()
    if link is None or nbytes is None:
        return link
    if nbytes < LEAST_BYTES:
        warn(f"{MOVES_NOTHING}another rank has no host memory for it, and the plans of all ranks are equal")
        return None
    return replace(link, host_bytes=nbytes)


def offloads(config: RematConfig) -> bool:
    """Returns whether `offload` is on; warns of a `host_memory` that does nothing as it is not."""
    is_on = config.offload != "off"
    if not is_on and config.host_memory != RematConfig.host_memory:
        warn("host_memory does nothing: offload is off")
    return is_on


def _why_nothing_moves(config: RematConfig) -> str:
    if config.gradients == "early":
        return "it is not available with gradients = early yet"
    if config.slices != "off":
        return "it is not available with slices yet"
    if config.mode is not None and any("cudagraph" in name for name, on in mode_options(config.mode).items() if on):
        return f"under CUDA graphs (mode = {config.mode}) copies of the host cannot be replayed"
    return ""


def host_link(device: Device, most_bytes: int) -> Link | None:
    """Returns the link of a device to its host; warns and returns None if its bandwidth is not known."""
    rates = device.host_rates
    if rates is None:
        warn(f"{MOVES_NOTHING}the bandwidth between {device.name} and the host is not known")
        return None
    return Link(*rates, most_bytes, device.host_copy_slowdown, rounds_up=True)


def host_bytes(share: Reserve) -> int:
    """Returns the bytes of host memory that this process may take; a percentage is rounded down, by less than a fifth.

    Raises:
        ConfigError: They are more than the host has free, or a percentage of memory that the system does not report.
    """
    free_bytes = host_free_bytes()
    if free_bytes is None:
        if share.kind == "percent":
            raise ConfigError("host_memory = a percentage: this system does not report its free memory; give a size.")
        return share.of(0)
    if share.kind == "percent":
        return _steady(share.of(free_bytes) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if share.of(0) > free_bytes:
        raise ConfigError(f"host_memory = {share}: the host has {format_bytes(free_bytes)} free.")
    return share.of(0)


def _steady(nbytes: int) -> int:
    """Returns the bytes, rounded down to three binary digits: free memory changes all the time, and torch's caches compare keys."""
    step = 1 << max(0, nbytes.bit_length() - 3)
    return nbytes // step * step


def without_identity(passes: Iterable[UserPass]) -> list[str]:
    """Returns the names of the passes without a `uuid()`, or whose `uuid()` is None."""
    return [each.name for each in passes if each.uuid is None]


def _plan_dir(config: RematConfig) -> str | None:
    """Returns the folder of pinned plans: below `plan_dir`, each set of passes has its own, and one without identity has none."""
    passes = config.joint_passes or ()
    if config.plan_dir is None or not passes:
        return config.plan_dir
    if without_identity(passes):
        return None
    key = hashlib.sha256("\n".join(str(each.uuid) for each in passes).encode()).hexdigest()[:16]
    return os.path.join(config.plan_dir, f"passes-{key}")


def with_plain_bytes(settings: Settings) -> Settings:
    """Returns the settings with the process's largest plain peak so far, if the budget is a fraction."""
    if settings.budget.kind != "fraction":
        return settings
    return replace(settings, plain_bytes=largest_plain_bytes(settings.device.name))


def settings_or_failure(
    config: RematConfig, example_inputs: Sequence[Any], agreement: Agreement | None = None
) -> tuple[Settings, str]:
    """Returns the settings and an empty text, or default settings and the reason why looking them up failed.

    Raises:
        RematError: A setting is invalid, or a rank has failed.
    """
    try:
        return settings_for(config, example_inputs, agreement), ""
    except RematError:
        raise
    except Exception as error:
        budget = MemoryBudget("max") if config.memory_budget.kind == "auto" else config.memory_budget
        return Settings(
            budget, load_device("cpu"), joint_passes=config.joint_passes or ()
        ), f"{type(error).__name__}: {error}"


def priced(
    settings: Settings,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    patches: Mapping[str, Any],
    agreement: Agreement | None = None,
) -> Settings:
    """Returns the settings, with measured times of the graph's operators if `cost_model` is `profile`.

    Args:
        patches: Inductor's options; the joint graph depends on them.
        agreement: Agreement of the ranks that compile this graph on the times of rank 0; None for this process's own times.
    """
    if config.cost_model != "profile":
        return settings
    times = op_timing.times_for(gm, example_inputs, place_of(example_inputs), patches, config.compiler, agreement)
    return replace(settings, times=times)


def _check_is_here(given: str, device: Device, place: torch.device) -> None:
    """Raise ConfigError if `given` names another device of the table; a file passes, since `calibrate` may have written it here."""
    if given in device_names() and device.name != detect(place).name:
        raise ConfigError(
            f"cost_model = 'profile' times operators on the device that is here ({detect(place).name}), and "
            f"device = {given!r} is another one. Leave device out, or take cost_model = 'roofline'."
        )


Smallest = Callable[[int | None, str], int | None]
"""Maps this rank's bytes (None if unknown), with a text that names device type and setting, to the smallest of all ranks."""


def auto_budget(
    config: RematConfig,
    place: torch.device,
    others_bytes: int,
    smallest: Smallest | None = None,
    gradient_bytes: int = 0,
) -> MemoryBudget:
    """Returns a budget of the device's free bytes less those still to be allocated beside the graphs; `max` if unknown.

    Args:
        others_bytes: Bytes that will still be allocated beside the graphs.
        smallest: Asks the other ranks for the smallest figure, which all ranks get; None to use this process's figure alone.
        gradient_bytes: Bytes of gradients that an earlier micro-batch would leave; only logged.
    """
    free = free_memory.read(place, config.capacity)
    budget_bytes = None if free is None else free_memory.auto_budget_bytes(free, config.reserve, others_bytes)
    if smallest is not None:
        budget_bytes = smallest(budget_bytes, f"{place.type} {config.memory_budget}")
    if free is not None and budget_bytes is not None:
        LOG.info("%s", free_memory.describe(free, budget_bytes, gradient_bytes))
    return MemoryBudget("max") if budget_bytes is None else MemoryBudget("bytes", budget_bytes)


def hook_workspace_bytes(config: RematConfig, example_inputs: Sequence[Any]) -> int:
    """Returns the bytes that optimizer hooks need beside the graph to step each parameter when its gradient leaves early."""
    if config.gradients == "end":
        return 0
    return config.optimizer_state.workspace_of(free_memory.largest_trainable_bytes(example_inputs))


def state_bytes(config: RematConfig, example_inputs: Sequence[Any]) -> int:
    """Returns the bytes that the optimizer of `optimizer_state` allocates for the parameters that require a gradient."""
    held = held_by_running()
    return config.optimizer_state.of(
        free_memory.trainable_bytes(example_inputs) if held is None else held.trainable_bytes
    )


@dataclass(frozen=True)
class LaterAuto:
    """Reads `auto` again when the second step begins; a call returns the budget, the smallest of all ranks.

    Gradients that are allocated by then stay allocated while the step runs: the step is the second micro-batch of several, or
    gradients are set to zero and not to None.  Their bytes are therefore not free.  While the first gradients accumulate, the
    optimizer has not stepped: its state is still to come, less the growth of allocated bytes other than gradients since.

    Attributes:
        place: The device.
        allocated_bytes: Bytes allocated on the device at the first reading, without gradients and with cuBLAS's workspaces.
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
        """Returns a `LaterAuto` whose first reading is now."""
        place = place_of(example_inputs)
        memory = free_memory.read(place, config.capacity)
        allocated_bytes = free_memory.blas_bytes(device.blas_workspace_bytes) - free_memory.gradient_bytes(
            example_inputs
        )
        allocated_bytes += 0 if memory is None else memory.allocated
        coming, workspace = state_bytes(config, example_inputs), hook_workspace_bytes(config, example_inputs)
        return LaterAuto(config, place, allocated_bytes, coming, workspace)

    def __call__(self, gradient_bytes: int) -> MemoryBudget:
        """Returns the budget while `gradient_bytes` bytes of gradients are allocated."""

        def smallest(nbytes: int | None, setting: str) -> int | None:
            return agreed_again(nbytes, setting, self.config.rank_timeout)

        held, memory = held_by_running(), free_memory.read(self.place, self.config.capacity)
        risen_bytes = 0 if memory is None else memory.allocated - gradient_bytes - self.allocated_bytes
        others_bytes = max(0, self.state_bytes - max(0, risen_bytes))
        others_bytes += self.workspace_bytes + (0 if held is None else held.coming_bytes)
        return auto_budget(self.config, self.place, others_bytes, smallest)


def place_of(example_inputs: Sequence[Any]) -> torch.device:
    """Returns the accelerator among the devices of a graph's inputs, or the CPU."""
    devices = [t.device for t in example_inputs if isinstance(t, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def sizes_of(example_inputs: Sequence[Any]) -> Sizes:
    """Returns the symbols among a graph's inputs with their sizes, without jagged symbols, which have no number."""
    symbols = (s for s in example_inputs if isinstance(s, torch.SymInt) and not sizes.is_jagged(s))
    return tuple((str(s), sizes.hint_int(s)) for s in symbols)


def positions_of(example_inputs: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Returns the symbols among a graph's inputs with their positions."""
    return tuple((str(s), k) for k, s in enumerate(example_inputs) if isinstance(s, torch.SymInt))
