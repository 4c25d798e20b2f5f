"""``torch.compile(model, backend="remat")``: from a Dynamo graph to a compiled one inside a memory budget."""

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from compile_remat import _torch, capacity
from compile_remat._torch_inductor import (
    CustomPartitionerFn,
    compile_eager,
    compile_plain,
    compile_with_partitioner,
    get_hash_for_files,
)
from compile_remat.budget import MemoryBudget
from compile_remat.config import RematConfig, split_options
from compile_remat.cost_models import Device, detect, load_device
from compile_remat.errors import PlannerWarning, RematError
from compile_remat.partitioner import PlannerFailed, Settings, split, split_without_planner, warn_of_fallback

LOG = logging.getLogger("compile_remat")
E = TypeVar("E", bound=BaseException)

STRICT_OPTIONS = {"allow_buffer_reuse": False}
"""With it, Inductor's wrapper keeps a dead buffer for a later one of its size where its own estimate of the peak, which is
too high, seems to allow it: 3 MiB more than planned on a GPT at its floor."""


def remat(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    name: str | None = None,
    config_patches: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend.  Errors of ours come out of the first call, because Dynamo would wrap and could swallow them."""
    try:
        given = dict(options or {})
        if mode is not None:
            given.setdefault("mode", mode)
        own, inductor = split_options(given, _torch.inductor_option_names())
        config = RematConfig.resolve(own, modes=_torch.mode_names())
        LOG.setLevel(config.log.upper())
        patches = {**_torch.mode_options(config.mode), **inductor, **(config_patches or {})}
        return compile_graph(gm, example_inputs, config, patches)
    except RematError as error:
        return _raiser(error)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: RematConfig, patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile one Dynamo graph under resolved settings.

    Raises:
        RematError: A setting is off, or no plan fits the budget.
    """
    if not _torch.is_supported():
        warnings.warn(
            f"compile_remat supports torch 2.11 to 2.15, not {torch.__version__}: plain Inductor compiles this graph "
            "and no memory budget holds",
            PlannerWarning,
            stacklevel=2,
        )
        return compile_plain(gm, example_inputs, patches)
    settings = settings_for(config, example_inputs)
    try:
        return _enter(gm, example_inputs, config, patches, RematPartitioner(settings, sources_hash()))
    except Exception as error:
        ours = find_error(error, RematError)
        if ours is not None:
            raise ours from None
        failed = find_error(error, PlannerFailed)
        if failed is None:
            raise
        warn_of_fallback(failed)
        again = RematPartitioner(settings, sources_hash(), fallback=str(failed))
        return _enter(gm, example_inputs, config, patches, again)


def _enter(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    patches: Mapping[str, Any],
    partitioner: RematPartitioner,
) -> Callable[..., Any]:
    if config.compiler == "eager":
        return compile_eager(gm, example_inputs, partitioner)
    # `max` is Inductor as it is: a guard would only cost it fusions.
    strict = partitioner.settings.budget.kind != "max" and not partitioner.fallback
    # With nested regions Inductor's reuse of buffers is wrong by itself; see `_torch.calls_regions`.
    options = {**(STRICT_OPTIONS if strict or _torch.calls_regions(gm) else {}), **patches}
    return compile_with_partitioner(gm, example_inputs, partitioner, options, guarded=strict)


class RematPartitioner(CustomPartitionerFn):
    """The value that Inductor calls, pickles and hashes: its fields are all that a plan depends on."""

    def __init__(self, settings: Settings, sources_hash: str, fallback: str = "") -> None:
        self.settings = settings
        self.sources_hash = sources_hash
        self.plans_hash = _plans_hash(settings.plan_dir)
        self.fallback = fallback

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph (Inductor passes ``num_fwd_outputs``, ``static_lifetime_input_indices``, ``compiler``)."""
        keywords: dict[str, Any] = {
            "num_fwd_outputs": kwargs["num_fwd_outputs"],
            "static_lifetime_input_indices": kwargs.get("static_lifetime_input_indices"),
        }
        if self.fallback:
            return split_without_planner(gm, joint_inputs, self.fallback, **keywords)
        return split(gm, joint_inputs, self.settings, **keywords)

    def uuid(self) -> object:
        """Changes with our sources, the settings, the device's figures and the pinned plans."""
        return (self.sources_hash, repr(self.settings), self.plans_hash, self.fallback)


def settings_for(config: RematConfig, example_inputs: Sequence[Any]) -> Settings:
    """Look up what the settings stand for on this machine: the device's figures and the bytes behind `auto`."""
    place = _place_of(example_inputs)
    device = detect(place) if config.device == "detect" else load_device(config.device)
    budget, from_auto = config.memory_budget, config.memory_budget.kind == "auto"
    if from_auto:
        budget = _auto(config, device, place, example_inputs)
    return Settings(budget, device, config.cost_model, from_auto, config.plan_dir, config.report_dir)


def _auto(config: RematConfig, device: Device, place: torch.device, example_inputs: Sequence[Any]) -> MemoryBudget:
    free = capacity.read(place)
    if free is None:
        return MemoryBudget("max")
    budget_bytes = capacity.auto_budget_bytes(free, config.reserve, config.optimizer_state, example_inputs)
    LOG.info("%s", capacity.describe(free, budget_bytes))
    return MemoryBudget("bytes", budget_bytes)


def _place_of(example_inputs: Sequence[Any]) -> torch.device:
    devices = [t.device for t in example_inputs if isinstance(t, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _raiser(error: RematError) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def find_error(error: BaseException | None, kind: type[E]) -> E | None:
    """The first exception of that kind in the chain: torch wraps what a partitioner raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        inner = getattr(error, "inner_exception", None)
        error = inner or error.__cause__ or error.__context__
    return None


@functools.cache
def sources_hash() -> str:
    """Hash of our own source files and tables: another version of us makes another cache key."""
    root = Path(__file__).resolve().parent
    import compile_remat.cost_models as cost_models
    import compile_remat.passes as passes

    folders = [root, *(Path(m.__file__ or "").resolve().parent for m in (passes, cost_models))]
    files = sorted(str(f) for folder in folders for f in folder.glob("*") if f.suffix in (".py", ".json"))
    return str(get_hash_for_files(tuple(files)).hex())


def _plans_hash(plan_dir: str | None) -> str:
    """Hash of the pinned plans as they are now: torch's helper remembers files by their names, and these change."""
    files = sorted(Path(plan_dir).glob("*.plan.json")) if plan_dir else []
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest() if files else ""
