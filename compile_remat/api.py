"""The public interface: functions that show a plan before training with it, and `install`, which gives Inductor our partitioner.

`compile_remat` takes all its public names from this module when one is first used, so that `import compile_remat` is instant.
`compile_remat.__all__` lists these names; `import x as x` tells type checkers that this module exports `x`.
"""

# If isort sorted these imports, each name would get an import statement of its own.
# isort: skip_file

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from compile_remat._torch.isolated_trace import trace_isolated
from compile_remat._torch.version import version_problem
from compile_remat._util.log_output import show_from
from compile_remat._util.live_buffer import LiveBuffer as LiveBuffer
from compile_remat._util.size_range import SizeRange as SizeRange
from compile_remat.announcement import said_if_slow
from compile_remat.budget import MemoryBudget
from compile_remat.compilation.caveats import note_uncached, planned_inside
from compile_remat.compilation.driver import INNER_OPTIONS, STRICT_OPTIONS
from compile_remat.compilation.looking import look_at_graph
from compile_remat.config import RematConfig as RematConfig
from compile_remat.doors import warn_of_settings_left_aside
from compile_remat.errors import (
    BudgetError as BudgetError,
    CheckError as CheckError,
    CheckWarning as CheckWarning,
    ConfigError as ConfigError,
    DeviceError as DeviceError,
    GradientError as GradientError,
    InputChangedError as InputChangedError,
    MissingExtraError as MissingExtraError,
    PassError as PassError,
    PlanMismatchError as PlanMismatchError,
    PlannerWarning as PlannerWarning,
    RankError as RankError,
    RematError as RematError,
    SettingWarning as SettingWarning,
    SharedBudgetError as SharedBudgetError,
    TagConflictError as TagConflictError,
    find_error,
    warn,
)
from compile_remat.forecast.max_batch import MaxBatch as MaxBatch
from compile_remat.forecast.mesh.rank_figures import RankForecast as RankForecast, RankGraph as RankGraph
from compile_remat.forecast.mesh.step_moments import StepMoment as StepMoment
from compile_remat.inductor import inductor_options
from compile_remat.inductor.entry import NO_CACHES
from compile_remat.inductor.install import set_global_partitioner
from compile_remat.passes import (
    Plan as Plan,
    PlanOption as PlanOption,
    Offloaded as Offloaded,
    SlicedProduct as SlicedProduct,
    Status as Status,
)
from compile_remat.planning import op_timing
from compile_remat.planning.joint_planning import Planned
from compile_remat.partitioning.joint_split import partition as partition
from compile_remat.partitioning.partitioner import RematPartitioner, hash_of_plans, sources_hash
from compile_remat.planning.settings import offloads, place_of, settings_for
from compile_remat.report_table import Reports as Reports
from compile_remat.report import Report as Report, joined, reports as reports, reset_reports as reset_reports, write_to
from compile_remat.runtime.peak_monitor import MeasuredStep as MeasuredStep, measured_step as measured_step
from compile_remat.typed_options import options as options

if TYPE_CHECKING:
    from compile_remat.forecast.builders import Builder
    from compile_remat.forecast.target_step import Target


def look(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    /,
    *,
    for_budgets: bool = False,
    observes: bool = False,
    **settings: Any,
) -> list[Planned]:
    """Plan every graph of one forward call; the graphs themselves run in eager mode, and nothing is compiled.

    The state of `torch.compile` for the user does not change: compiled graphs, counts of recompilations, sizes seen.

    Args:
        for_budgets: True to build the problem as for a budget, even under `max`.
        observes: True to lower and read plans as in training, if the device is here.
        settings: A tensor among them is an input of the model by that name.

    Returns:
        The planned graphs that have a backward, in order.

    Raises:
        RematError: A setting is invalid, torch's version is not supported, or planning failed.
    """
    named, settings = _named_inputs(settings)
    config = _config(settings)
    if problem := version_problem():
        raise RematError(f"{problem}: install a supported torch to plan.")
    seen: list[Planned] = []
    failed: list[RematError] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            with said_if_slow(gm.graph, "planning"):
                planned = look_at_graph(gm, example_inputs, config, for_budgets=for_budgets, observes=observes)
            if planned is not None:
                seen.append(planned)
        except Exception as error:  # Dynamo would wrap a `RematError`, or swallow it
            ours = find_error(error, RematError)
            if ours is None:
                raise
            failed.append(ours)
        return gm.forward

    trace_isolated(model, backend, inputs, named)
    if failed:
        raise failed[0]
    return seen


def explain(model: Callable[..., Any], *inputs: Any, **settings: Any) -> Report:
    """Returns the report of ``torch.compile(model, backend="remat", options=settings)`` for the first graph of a call.

    Runs one forward in eager mode on `inputs`; a keyword with a tensor is an input by that name, as in
    ``explain(model, **batch, memory_budget=0.5)``.  If the device is here, Inductor lowers plans and their peaks are read, as in
    training, but no code is emitted.  If no plan fits the budget, training would raise a `BudgetError`; the report is then that of
    the lowest plan, OVER_BUDGET under the budget, and its message says so.

    Raises:
        RematError: A setting is invalid, or the call has no graph that needs a gradient.

    Examples:
        >>> layers = [layer for _ in range(20) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
        >>> model, batch = torch.nn.Sequential(*layers), torch.randn(2048, 256)
        >>> report = compile_remat.explain(model, batch, memory_budget="30MiB")
        >>> f"{report.plain.peak_bytes / 2**20:.1f} MiB under torch.compile, {report.predicted_peak_bytes / 2**20:.1f} MiB here"
        '44.3 MiB under torch.compile, 29.0 MiB here'
        >>> f"{report.plan.extra_share:+.0%} time"  # estimated for a CPU
        '+12% time'
    """
    warn_of_settings_left_aside("explain", settings)
    try:
        return _first(look(model, inputs, observes=True, **settings)).report
    except BudgetError as error:
        lowest = _first(look(model, inputs, observes=True, **{**settings, "memory_budget": "min"})).report
        text = f"training would raise a BudgetError: {' '.join(str(error).splitlines()[:2])} This report shows the lowest plan"
        found = lowest.plan and replace(lowest.plan, status=Status.OVER_BUDGET, budget_bytes=error.budget_bytes)
        message = joined(lowest.message, text)
        return replace(lowest, budget=error.written, budget_bytes=error.budget_bytes, plan=found, message=message)


def plan(model: Callable[..., Any] | str, *inputs: Any, **settings: Any) -> Plan:
    """Returns the plan of the first graph of a call; see `explain`.

    A builder's name (``pkg.module:build``, or one of `zoo`) in place of a model is planned without data for the setting `device`,
    which need not be here; the settings `batch`, `seq` and `dtype` go to the builder, see `builders`.  Its graphs are lowered for
    the device if g++ and triton are installed, else planned by rules; with `estimate=True` always by rules.

    Examples:
        >>> layers = [layer for _ in range(20) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
        >>> model, batch = torch.nn.Sequential(*layers), torch.randn(2048, 256)
        >>> found = compile_remat.plan(model, batch, memory_budget="30MiB")
        >>> f"{found.peak_bytes / 2**20:.1f} MiB, {len(found.saved)} tensors saved, {len(found.recomputed)} recomputed"
        '29.0 MiB, 21 tensors saved, 33 recomputed'

        On a GPU that is not here:

        >>> found = compile_remat.plan("resnet-50", device="l4", batch=64, memory_budget="2GiB", estimate=True)  # doctest: +SKIP
        >>> f"{found.peak_bytes / 2**20:.1f} MiB, {found.extra_share:+.1%} time"  # doctest: +SKIP
        '2046.9 MiB, +2.4% time'
    """
    if isinstance(model, str):
        return _plan_by_name(model, settings)
    warn_of_settings_left_aside("plan", settings)
    return _first(look(model, inputs, observes=True, **settings)).plan


def largest_batch(model: str | Callable[..., Any], **settings: Any) -> MaxBatch:
    """Returns the largest batch of a model that fits a device, with its plan and bytes; the device need not be here.

    Args:
        model: The name of a builder, or the function itself; see `plan` and `compile_remat.forecast.builders`.
        settings: `device`, and any of `optimizer_state`, `reserve`, `seq`, `dtype`, ... that differ from the defaults.

    Raises:
        RematError: A setting is invalid, the model cannot be traced, or the builder takes no `batch`.

    Examples:
        >>> found = compile_remat.largest_batch("resnet-50", device="l4", optimizer_state="sgd")  # doctest: +SKIP
        >>> found.batch, f"{found.plan.peak_bytes / 2**30:.1f} GiB"  # doctest: +SKIP
        (2141, '20.7 GiB')
    """
    from compile_remat.forecast.forecasting import forecast

    warn_of_settings_left_aside("largest_batch", settings)
    builder, target = _on_device(model, settings)
    if "batch" not in builder.sizes():
        raise ConfigError(f"batch: the builder {builder.name} takes none, so no largest batch can be searched.")
    target = replace(target, estimate=True, budget=MemoryBudget("auto"), slices="off", offload="off")
    found = forecast(builder, target, needs_max_batch=True).largest_batch
    if found is None:
        raise ConfigError(
            f"device = {target.device!r}: its capacity is not known; set capacity to the bytes that may be used."
        )
    return found


def plan_rank(
    model: str | Callable[..., Any],
    mesh: str,
    shard: str = "ddp",
    *,
    reshard_after_forward: bool | None = None,
    node_size: int = 8,
    network: str | None = None,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    **settings: Any,
) -> RankForecast:
    """Returns memory and time of a training step on one rank of a mesh, whose devices need not be here.

    `docs/guides/planning-hardware.md` says how it is worked out.

    Args:
        model: The name of a builder, or the function itself; see `plan`.
        mesh: Sizes of the dimensions, such as ``dp=8,tp=2``.
        shard: ``ddp``, ``fsdp2`` (around each block and the model) or ``fsdp2-whole``.
        reshard_after_forward: FSDP2's option; None for torch's default.
        node_size: Devices of one node.
        network: The link between nodes; None for the device's.
        param_dtype: FSDP2's ``MixedPrecisionPolicy`` dtype for gathered parameters and compute, such as ``bf16``; the setting
            `dtype` is that of the shards.
        reduce_dtype: FSDP2's ``MixedPrecisionPolicy`` dtype in which gradients are reduced.
        settings: As in `largest_batch`; `batch` is that of one data parallel rank.

    Raises:
        RematError: A setting is invalid, or the model cannot be traced.

    Examples:
        >>> rank = compile_remat.plan_rank("resnet-50", "dp=8", "ddp", device="l4", batch=64)  # doctest: +SKIP
        >>> f"{rank.total_bytes / 2**30:.1f} GiB"  # doctest: +SKIP
        '2.8 GiB'
    """
    from compile_remat.forecast.mesh.layout import MeshLayout
    from compile_remat.forecast.mesh.rank_forecast import forecast_rank

    warn_of_settings_left_aside("plan_rank", settings)
    layout = MeshLayout.parse(mesh, shard, reshard_after_forward, node_size, param_dtype, reduce_dtype)
    builder, target = _on_device(model, settings)
    return forecast_rank(builder, replace(target, gradients="end", slices="off"), layout, network)


def _plan_by_name(name: str, settings: dict[str, Any]) -> Plan:
    from compile_remat.forecast.forecasting import forecast

    warn_of_settings_left_aside("plan by name", settings)
    return forecast(*_on_device(name, settings), with_max_batch=False).plan


def _on_device(model: str | Callable[..., Any], settings: dict[str, Any]) -> tuple[Builder, Target]:
    from compile_remat.forecast.builders import Builder
    from compile_remat.forecast.target_step import Target

    sizes = {key: settings.pop(key) for key in ("batch", "seq", "dtype") if key in settings}
    estimate = bool(settings.pop("estimate", False))
    builder = Builder(model, **sizes)
    config = _config(settings)
    if config.device == "detect":
        raise ConfigError(
            f"device is not set: a plan for {builder.name} needs the name of a device or a JSON file of its figures."
        )
    return builder, Target(
        config.device,
        config.memory_budget,
        config.optimizer_state,
        config.reserve,
        config.cost_model,
        config.capacity,
        config.time_limit,
        config.gradients,
        config.slices,
        config.inputs,
        estimate,
        "auto" if offloads(config) else "off",
        config.host_memory.of(0) if config.host_memory.kind == "bytes" else None,
    )


def _named_inputs(settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the model's inputs among keywords, which are tensors, and the settings, which never are."""
    named = {name: value for name, value in settings.items() if isinstance(value, torch.Tensor)}
    return named, {name: value for name, value in settings.items() if name not in named}


def pareto(model: Callable[..., Any], *inputs: Any, points: int = 10, **settings: Any) -> list[Plan]:
    """Returns plans from the fastest to the one of lowest peak, each faster than all plans that need less memory.

    One search finds all these plans.  `plan` searches for one budget alone, and its plan may be a little faster.  With
    ``offload="auto"`` each plan may move tensors to the host (`Plan.offloaded`, `Plan.stall_time_ns`).

    Args:
        points: Number of budgets, evenly spaced between the lowest peak and the fastest plan's.

    Raises:
        RematError: A setting is invalid, or the call has no graph that needs a gradient.

    Examples:
        >>> layers = [layer for _ in range(20) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
        >>> model, batch = torch.nn.Sequential(*layers), torch.randn(2048, 256)
        >>> for found in compile_remat.pareto(model, batch, points=4):
        ...     print(f"{found.peak_bytes / 2**20:.1f} MiB, {found.extra_share:+.0%} time")
        44.3 MiB, -0% time
        34.3 MiB, +8% time
        24.3 MiB, +16% time
        15.8 MiB, +38% time
    """
    warn_of_settings_left_aside("pareto", settings)
    whole = {"memory_budget": "max", "slices": "off", "plan_dir": "none"}
    planned = _first(look(model, inputs, for_budgets=True, **{**settings, **whole}))
    chosen = planned.plan
    assert chosen.pictures is not None
    return [replace(found, plain_time_ns=chosen.plain_time_ns) for found in chosen.pictures.plans(points)]


def _config(settings: dict[str, Any]) -> RematConfig:
    """Returns the parsed settings, and shows messages from the level that the setting `log` asks for."""
    config = RematConfig.resolve(settings, modes=inductor_options.mode_names())
    if config.log is not None:
        show_from(config.log)
    return config


def _first(seen: Sequence[Planned]) -> Planned:
    if not seen:
        raise RematError(
            "nothing to plan: the call has no graph with a backward. Are gradients on, and does an input or a "
            "parameter require one?"
        )
    return seen[0]


def install(**settings: Any) -> None:
    """Let Inductor itself use our partitioner in this process, for tools that only know the name "inductor".

    Accelerate and the Hugging Face Trainer accept no other backend name.  If the model can be compiled before they get it,
    ``model.compile(backend="remat")`` is better, because `install` lacks the parts that keep a budget around Inductor.  Emitted
    code is not compared with the budget, and a measured peak may exceed the predicted one by a few per cent; each graph has the
    whole budget for itself, at the sizes of its compilation; `auto` reads the free memory once, in this call; a step that runs out
    of memory does not run again; no peaks are measured; an error, and a failure of the planner, is wrapped in
    ``BackendCompilerFailed``; a graph in Inductor's cache has no row in `reports`; `check` compares nothing, with a warning;
    `cost_model="profile"` uses only the times in its file.  docs/reference/install.md has the table.

    `install` turns Inductor's `allow_buffer_reuse` off: with it, regions that are compiled once would have wrong gradients.  It
    also turns off `reorder_for_locality`, for the sake of graphs that compute gradients themselves; Inductor's
    `joint_custom_post_pass` plans these graphs, unless you have set one.  `uninstall` undoes `install`.  With an unsupported
    torch, `install` warns and leaves Inductor as it is.

    Raises:
        RematError: A setting is invalid.

    Examples:
        >>> layers = [layer for _ in range(20) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
        >>> model, batch = torch.nn.Sequential(*layers), torch.randn(2048, 256)
        >>> compile_remat.install(memory_budget="30MiB")
        >>> torch.compile(model)(batch).mean().backward()  # Inductor, by any tool
        >>> f"{compile_remat.reports()[-1].predicted_peak_bytes / 2**20:.1f} MiB"  # 44.3 without
        '29.0 MiB'
        >>> compile_remat.uninstall()
    """
    warn_of_settings_left_aside("install", settings)
    config = _config(settings)
    if problem := version_problem():
        warn(f"{problem}: Inductor is left as it is and no memory budget holds")
        return
    if config.check:
        warn('check needs torch.compile(backend="remat"); under install() nothing is compared', CheckWarning)
    if config.gradients == "early":
        warn(
            "gradients = early needs torch.compile(backend='remat'); under install() gradients leave the backward at its end"
        )
    note_uncached(config)
    here = [torch.empty(0, device="cuda")] if torch.cuda.is_available() else []
    settings_now = settings_for(config, here)
    if config.cost_model == "profile":
        settings_now = replace(settings_now, times=op_timing.known_times(place_of(here)))
    partitioner = RematPartitioner(
        settings_now,
        sources_hash=sources_hash(),
        plans_hash=hash_of_plans(settings_now.plan_dir),
        is_installed=True,
    )
    set_global_partitioner(
        partitioner,
        {**STRICT_OPTIONS, **INNER_OPTIONS, **({} if settings_now.can_be_cached else NO_CACHES)},
        rewrite=partial(planned_inside, partitioner=partitioner),
    )
    write_to(config.report_dir)


def uninstall() -> None:
    """Give Inductor its own partitioner back; see `install` for an example."""
    set_global_partitioner(None)
    write_to(None)
