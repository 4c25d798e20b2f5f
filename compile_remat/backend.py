"""The backend ``torch.compile(model, backend="remat")``: compiles a Dynamo graph inside a memory budget."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from compile_remat._torch.delivery.returned_gradients import handing_back
from compile_remat._torch.ranks.groups import communicates
from compile_remat._torch.tensor_arguments import ends_in_graph_break, is_cut_by_torch
from compile_remat._torch.version import version_problem
from compile_remat._util.frame_chunk import frames_in_one_chunk
from compile_remat._util.log_output import show_from
from compile_remat.announcement import said_if_slow
from compile_remat.compilation.caveats import note_uncached
from compile_remat.compilation.driver import Compilation
from compile_remat.compilation.early_gradients import leaf_positions, why_off
from compile_remat.compilation.recompile import recompiler_of
from compile_remat.compilation.regions import RegionMaker
from compile_remat.config import RematConfig, split_options
from compile_remat.device import free_memory
from compile_remat.errors import (
    BudgetError,
    ConfigError,
    RematError,
    find_error,
    warn,
    without_traceback,
)
from compile_remat.inductor import inductor_options
from compile_remat.inductor.entry import compile_plain
from compile_remat.inductor.install import PARTITIONER_OPTION
from compile_remat.partitioning.joint_split import PlannerFailed, warn_of_fallback
from compile_remat.partitioning.partitioner import RematPartitioner, hash_of_plans, sources_hash
from compile_remat.passes.graph.rewrite_list import apply
from compile_remat.passes.graph.rewrites.contract import Context, Stage
from compile_remat.planning.budget_source import source_of
from compile_remat.planning.plain_peaks import note_plain_peak
from compile_remat.planning.request import Fit, Request
from compile_remat.planning.settings import (
    LaterAuto,
    Settings,
    place_of,
    positions_of,
    priced,
    settings_or_failure,
    sizes_of,
)
from compile_remat.ranks.agreement import Agreement
from compile_remat.report import Report
from compile_remat.runtime.region import RunningPlan
from compile_remat.runtime.shared_budget import SharedBudget, budget_of
from compile_remat.verify.attribution import Arguments

LOG = logging.getLogger("compile_remat")


def remat(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | RematConfig | None = None,
    mode: str | None = None,
    name: str | None = None,
    config_patches: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend: returns the compiled graph.

    A `RematError` is raised at the first call of the result, because Dynamo would wrap, and could swallow, an error raised here.
    """
    try:
        own, inductor = split_options(_given(options, mode), inductor_options.inductor_option_names())
        _check_inductor(inductor)
        config = RematConfig.resolve(own, modes=inductor_options.mode_names())
        if config.log is not None:
            show_from(config.log)
        patches = {**inductor_options.mode_options(config.mode), **inductor, **(config_patches or {})}
        return compile_graph(gm, example_inputs, config, patches)
    except RematError as error:
        return _raiser(error)


@frames_in_one_chunk
def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    patches: Mapping[str, Any],
    partitioner_type: type[RematPartitioner] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph under resolved settings; tests pass a partitioner type whose plans are broken.

    Raises:
        RematError: A setting is invalid, or no plan fits the budget.
    """
    problem = version_problem()
    if problem:
        no_promise = "plain Inductor compiles this graph and no memory budget holds"
        warn(f"{problem}: {no_promise}")
        return compile_plain(gm, example_inputs, patches)
    doing = "planning and compiling"
    with said_if_slow(gm.graph, doing), Agreement.of(gm, example_inputs, config.rank_timeout) as agreement:
        return _compile_in_agreement(gm, example_inputs, config, patches, partitioner_type, agreement)


def _compile_in_agreement(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    patches: Mapping[str, Any],
    partitioner_type: type[RematPartitioner] | None,
    agreement: Agreement,
) -> Callable[..., Any]:
    """Compile one Dynamo graph in agreement with the other ranks that compile it; see `compile_graph`."""
    sizes = sizes_of(example_inputs)
    if late := why_off(config, example_inputs, patches):
        warn(late)
    note_uncached(config)
    settings, reason = settings_or_failure(config, example_inputs, agreement)
    agreement.begin()
    apply(Stage.PROGRAM, gm, Context(inlines_regions=settings.has_limit(gm)))
    settings = priced(settings, gm, example_inputs, config, patches, agreement)
    make = functools.partial(
        partitioner_type or RematPartitioner,
        settings,
        sources_hash=sources_hash(),
        plans_hash=hash_of_plans(settings.plan_dir),
        sizes=sizes,
        early=leaf_positions(example_inputs) if config.gradients == "early" and not late else (),
    )
    if not reason:
        try:
            return _compile(gm, example_inputs, config, patches, make(guarded=settings.has_limit(gm)), agreement)
        except Exception as error:
            ours, failed = find_error(error, RematError), find_error(error, PlannerFailed)
            if ours is not None:
                raise ours from None
            if failed is None:
                raise
            reason = str(failed)
    warn_of_fallback(reason)
    return _compile(gm, example_inputs, config, patches, make(fallback=reason), agreement)


def _shared_budget(config: RematConfig, settings: Settings, example_inputs: Sequence[Any]) -> SharedBudget | None:
    """Returns the budget that the graph shares with the other graphs of its device; None if it has no such budget."""
    has_budget = settings.is_given or settings.from_auto
    if not has_budget or settings.budget.kind == "max":
        return None
    place = place_of(example_inputs)
    source = source_of(settings.budget, from_auto=settings.from_auto)
    shared = budget_of(place, str(config.memory_budget), settings.budget, source=source, name=settings.device.name)
    if settings.from_auto and shared.is_idle:
        shared.reread = LaterAuto.after(config, settings.device, example_inputs)
    return shared


def _request(
    config: RematConfig, shared: SharedBudget | None, gradient_bytes: int, *, more_follow: bool, otherwise: Request
) -> Request:
    """Returns the request: a plan option with a menu if the region has peers or several calls in a step; else the whole budget.

    Args:
        more_follow: True if Dynamo says that other graphs of the step are still to come.
        otherwise: The request if no budget is shared.
    """
    if shared is None:
        return otherwise
    calls = config.instances or 0
    if calls < 2 and not shared.calls_in_flight:
        if calls or not (shared.expects_peers or more_follow):
            return Fit()
    return shared.option_beside_others(calls, gradient_bytes, more_follow=more_follow)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    patches: Mapping[str, Any],
    partitioner: RematPartitioner,
    agreement: Agreement,
) -> Callable[..., Any]:
    """Compile the graph, and add the hooks that the settings ask for to its calls."""
    # Read before Inductor rewrites the graph.
    is_shared_work, names = communicates(gm, example_inputs), Arguments.of(gm).names
    compilation = Compilation(gm, example_inputs, config, patches)
    recompiler = None if config.check else recompiler_of(compilation)  # a check runs other code besides the plan's
    shared = None if recompiler is None else _shared_budget(config, partitioner.settings, example_inputs)
    request = functools.partial(
        _request,
        config,
        shared,
        free_memory.trainable_bytes(example_inputs),
        more_follow=ends_in_graph_break(gm) or is_cut_by_torch(),
        otherwise=partitioner.request,
    )
    if shared is not None:
        settings = replace(partitioner.settings, budget=shared.budget)
        partitioner = replace(partitioner, settings=settings, request=request())
    place, positions = place_of(example_inputs), positions_of(example_inputs)
    maker = RegionMaker(config, partitioner, place, positions, shared, recompiler, is_shared_work, names)
    try:
        compiled, reports = compilation.run(partitioner)
    except Exception as error:
        refusal = find_error(error, BudgetError)
        if refusal is None or not partitioner.sizes or recompiler is None or not agreement.is_alone:
            raise
        return maker.refused(refusal, request)
    for found in reports:  # also the reports of a cache hit, for which no partitioner ran
        note_plain_peak(partitioner.settings.device.name, found)
    report = reports[-1] if reports else None
    _conclude(agreement, partitioner, report)
    if report is None or report.plan is None:
        return handing_back(compiled) if partitioner.early else compiled
    return maker.region(RunningPlan(compiled, report), compilation.written)


def _conclude(agreement: Agreement, partitioner: RematPartitioner, report: Report | None) -> None:
    """Exchange the plan of the graph with the other ranks.

    Raises:
        RankError: The plans of the ranks differ.
    """
    plan = None if report is None else report.plan
    apart = [] if plan is None else [*map(str, plan.sliced), *map(str, plan.offloaded)]
    saved = None if plan is None else (*plan.saved, "again", *plan.again, "written", *plan.written, *apart)
    budget_bytes = None if report is None else report.budget_bytes
    agreement.conclude(saved, budget_bytes, from_auto=partitioner.settings.from_auto)


def _given(options: object, mode: str | None) -> dict[str, object]:
    """Returns options and mode as one dict; torch.compile takes either, and passes on any value."""
    if isinstance(options, RematConfig):
        options = options.as_options()
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options = {options!r}: options are a dict from names to values, or a RematConfig.")
    given = dict(options or {})
    if mode is not None:
        given.setdefault("mode", mode)
    return given


def _check_inductor(options: Mapping[str, Any]) -> None:
    """Refuse invalid options of Inductor, on which it would fail later, and the option that replaces our partitioner.

    Raises:
        ConfigError: There is such an option.
    """
    if options.get(PARTITIONER_OPTION) is not None:
        raise ConfigError(
            f"the backend remat sets {PARTITIONER_OPTION!r} itself; use backend='inductor' with a partitioner of your own."
        )
    for name, value in options.items():
        problem = inductor_options.inductor_option_problem(name, value)
        if problem:
            raise ConfigError(f"{name} = {value!r} (an option of Inductor): {problem}.")


def _raiser(error: RematError) -> Callable[..., Any]:
    LOG.debug("where it was raised", exc_info=error)
    error = without_traceback(error)  # a hundred frames of compilers do not help with a budget

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise without_traceback(error)  # a copy: the traceback of a raised error holds the model and its inputs

    return fail
