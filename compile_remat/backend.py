"""``torch.compile(model, backend="remat")``: from a Dynamo graph to a compiled one inside a memory budget."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from compile_remat import _torch, capacity, side_files
from compile_remat._torch_inductor import (
    PARTITIONER_OPTION,
    CustomPartitionerFn,
    Observer,
    compile_eager,
    compile_plain,
    compile_with_partitioner,
    get_hash_for_files,
)
from compile_remat._torch_version import version_problem
from compile_remat.budget import MemoryBudget
from compile_remat.check import compile_checked
from compile_remat.config import RematConfig, split_options
from compile_remat.cost_models import Device, detect, load_device
from compile_remat.errors import ConfigError, PlanMismatchError, PlannerWarning, RematError, warn
from compile_remat.partitioner import PlannerFailed, Settings, split, split_without_planner, warn_of_fallback
from compile_remat.passes import Status
from compile_remat.report import Report, record, recording, write
from compile_remat.scheduled import Emissions, bytes_to_plan_for, settle, with_scheduled_peak

LOG = logging.getLogger("compile_remat")
E = TypeVar("E", bound=BaseException)

STRICT_OPTIONS = {"allow_buffer_reuse": False}
"""With it, Inductor's wrapper keeps a dead buffer for a later one of its size where its own estimate of the peak, which is
too high, seems to allow it: 3 MiB more than planned on a GPT at its floor."""


ORDERED_OPTIONS = {"reorder_for_peak_memory": False}
"""Under `fallback_random` numbers come from eager mode's generator in the order of the calls, and torch 2.11 moves these
calls where that lowers its estimate of the peak; plain torch.compile then draws other numbers than eager mode, too."""


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
        own, inductor = split_options(_given(options, mode), _torch.inductor_option_names())
        _check_inductor(inductor)
        config = RematConfig.resolve(own, modes=_torch.mode_names())
        LOG.setLevel(config.log.upper())
        patches = {**_torch.mode_options(config.mode), **inductor, **(config_patches or {})}
        return compile_graph(gm, example_inputs, config, patches)
    except RematError as error:
        return _raiser(error)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    patches: Mapping[str, Any],
    partitioner_type: type[RematPartitioner] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph under resolved settings; tests hand in a partitioner whose plans are broken.

    Raises:
        RematError: A setting is off, or no plan fits the budget.
    """
    problem = version_problem()
    if problem:
        no_promise = "plain Inductor compiles this graph and no memory budget holds"
        warnings.warn(f"{problem}: {no_promise}", PlannerWarning, stacklevel=2)
        return compile_plain(gm, example_inputs, patches)
    sizes = _sizes_of(example_inputs)
    settings, reason = _settings_or_failure(config, example_inputs)
    make = partitioner_type or RematPartitioner
    if not reason:
        try:
            partitioner = make(settings, sources_hash(), sizes=sizes, guarded=settings.has_limit(gm))
            return _enter(gm, example_inputs, config, patches, partitioner)
        except Exception as error:
            ours, failed = find_error(error, RematError), find_error(error, PlannerFailed)
            if ours is not None:
                raise ours from None
            if failed is None:
                raise
            reason = str(failed)
    warn_of_fallback(reason)
    return _enter(gm, example_inputs, config, patches, make(settings, sources_hash(), reason, sizes=sizes))


def _enter(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    patches: Mapping[str, Any],
    partitioner: RematPartitioner,
) -> Callable[..., Any]:
    # With nested regions Inductor's reuse of buffers is wrong by itself; see `_torch.calls_regions`.
    strict = partitioner.guarded or _torch.calls_regions(gm)
    ordered = patches.get("fallback_random", _torch.draws_as_eager_mode())
    options = {**(STRICT_OPTIONS if strict else {}), **(ORDERED_OPTIONS if ordered else {}), **patches}

    def enter(chosen: CustomPartitionerFn, observer: Observer | None = None) -> Callable[..., Any]:
        if config.compiler == "eager":
            return compile_eager(gm, example_inputs, chosen)
        guarded = partitioner.guarded
        return compile_with_partitioner(gm, example_inputs, chosen, options, guarded=guarded, observer=observer)

    def path_of(chosen: RematPartitioner) -> Path | None:
        if config.compiler == "eager" or config.check:  # a check takes nothing from a cache
            return None
        return side_files.path_of(gm, example_inputs, chosen.uuid(), options)

    with recording() as reports:
        if config.check:
            compiled = compile_checked(gm, example_inputs, partitioner, enter, config.report_dir)
        elif config.compiler == "eager" or not partitioner.guarded:
            compiled = enter(partitioner)
            _keep(path_of(partitioner), reports)
        else:
            compiled = compile_within(partitioner, enter, path_of)
    if config.report_dir is not None:
        for report in reports:
            write(report, config.report_dir)
    return compiled


def _keep(side_file: Path | None, reports: Sequence[Report]) -> None:
    """Store what was planned; where torch's cache had the graphs, so that nothing was, record what was stored then."""
    if side_file is None:
        return
    if reports:
        side_files.store(side_file, reports)
        return
    for report in side_files.recall(side_file):
        record(report)
        LOG.info("%s", report)
        if report.message and report.status != Status.FALLBACK.name:  # of a failed planner we warned just now
            warn(report.message)


TIGHTENINGS = 2
"""So often a graph is planned and compiled again where Inductor's code needs more than the budget."""


def compile_within(
    partitioner: RematPartitioner,
    enter: Callable[[CustomPartitionerFn, Observer | None], Callable[..., Any]],
    path_of: Callable[[RematPartitioner], Path | None],
) -> Callable[..., Any]:
    """Compile, compare the peak of the final code with the budget, and where it is above, plan for less and compile again.

    Raises:
        BudgetError: The code of the lowest plan needs more than the budget.
    """
    side_file = path_of(partitioner)
    for _ in range(TIGHTENINGS):  # where an earlier process ended
        bytes_then = None if side_file is None else side_files.recall_tightened(side_file)
        if bytes_then is None:
            break
        partitioner = partitioner.tightened(bytes_then)
        side_file = path_of(partitioner)
    for left in reversed(range(TIGHTENINGS + 1)):
        with recording() as reports:
            emissions = Emissions()
            compiled = enter(partitioner, emissions)
            reports[:] = with_scheduled_peak(reports, emissions)
            tightened_bytes = bytes_to_plan_for(reports, partitioner.settings) if left else None
            if tightened_bytes is None:
                reports[:] = settle(reports, partitioner.settings)
                _keep(side_file, reports)
                return compiled
            if side_file is not None:
                side_files.store(side_file, reports, tightened_bytes)
            LOG.info("%s", reports[0])
            reports.clear()
        partitioner = partitioner.tightened(tightened_bytes)
        side_file = path_of(partitioner)
    raise AssertionError("the last round returns")


class RematPartitioner(CustomPartitionerFn):
    """The value that Inductor calls, pickles and hashes: its fields are all that a plan depends on.

    Attributes:
        fallback: Why the planner failed; with a reason here the planner is left alone.
        sizes: The symbols among a graph's inputs and the sizes that they stood for.  A plan is made for these, and torch's key
            has the symbols alone: without them a plan for a small batch would come out of the cache for a large one.
        guarded: Whether Inductor's fusions are kept to the plan, which torch's key does not see.
    """

    def __init__(
        self,
        settings: Settings,
        sources_hash: str,
        fallback: str = "",
        *,
        sizes: tuple[tuple[str, int], ...] = (),
        guarded: bool = False,
    ) -> None:
        self.settings = settings
        self.sources_hash = sources_hash
        self.plans_hash = _plans_hash(settings.plan_dir)
        self.fallback = fallback
        self.sizes = sizes
        self.guarded = guarded

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph (Inductor passes ``num_fwd_outputs``, ``static_lifetime_input_indices``, ``compiler``)."""
        keywords: dict[str, Any] = {
            "num_fwd_outputs": kwargs["num_fwd_outputs"],
            "static_lifetime_input_indices": kwargs.get("static_lifetime_input_indices"),
        }
        if self.fallback:
            return split_without_planner(gm, joint_inputs, self.settings, self.fallback, **keywords)
        return split(gm, joint_inputs, self.settings, **keywords)

    def tightened(self, planning_bytes: int) -> RematPartitioner:
        """One that plans for fewer bytes than the budget."""
        other = copy.copy(self)
        other.settings = replace(self.settings, tightened_bytes=planning_bytes)
        return other

    def uuid(self) -> object:
        """Changes with our sources, the settings, the device's figures and the pinned plans."""
        return (self.sources_hash, repr(self.settings), self.plans_hash, self.fallback, self.sizes, self.guarded)


def _given(options: object, mode: str | None) -> dict[str, object]:
    """Options and mode as one; torch.compile takes either, and passes on whatever it was given."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options = {options!r}: options are a dict from names to values.")
    given = dict(options or {})
    if mode is not None:
        given.setdefault("mode", mode)
    return given


def _check_inductor(options: Mapping[str, Any]) -> None:
    """Refuse what Inductor would stumble over later, or what would take our place."""
    if options.get(PARTITIONER_OPTION) is not None:
        raise ConfigError(f"the backend remat sets {PARTITIONER_OPTION!r} itself; use the backend inductor with yours.")
    for name, value in options.items():
        problem = _torch.inductor_option_problem(name, value)
        if problem:
            raise ConfigError(f"{name} = {value!r} (an option of Inductor): {problem}.")


def _settings_or_failure(config: RematConfig, example_inputs: Sequence[Any]) -> tuple[Settings, str]:
    """Settings, and why the machine could not be asked for them; a setting that is off is an error all the same."""
    try:
        return settings_for(config, example_inputs), ""
    except RematError:
        raise
    except Exception as error:
        budget = MemoryBudget("max") if config.memory_budget.kind == "auto" else config.memory_budget
        return Settings(budget, load_device("cpu")), f"{type(error).__name__}: {error}"


def _sizes_of(example_inputs: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((str(s), _torch.hint_int(s)) for s in example_inputs if isinstance(s, torch.SymInt))


def settings_for(config: RematConfig, example_inputs: Sequence[Any]) -> Settings:
    """Look up what the settings stand for on this machine: the device's figures and the bytes behind `auto`."""
    place = _place_of(example_inputs)
    device = detect(place) if config.device == "detect" else load_device(config.device)
    budget, from_auto = config.memory_budget, config.memory_budget.kind == "auto"
    if from_auto:
        budget = _auto(config, device, place, example_inputs)
    return Settings(
        budget,
        device,
        config.cost_model,
        from_auto,
        config.plan_dir,
        is_given=config.memory_budget.is_given,
        torch_ratio=_torch.config_ratio(),
    )


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
        try:
            content = file.read_bytes()
        except OSError as error:
            raise PlanMismatchError(f"{file} cannot be read: {error.strerror}.") from None
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest() if files else ""
