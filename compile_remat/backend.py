"""``torch.compile(model, backend="remat")``: from a Dynamo graph to a compiled one inside a memory budget."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from compile_remat._torch import inductor_options
from compile_remat._torch.step_peers import company
from compile_remat._torch.version import version_problem
from compile_remat.budget import OptimizerState
from compile_remat.compilation.driver import Compilation, Later
from compile_remat.config import RematConfig, split_options
from compile_remat.device import free_memory
from compile_remat.errors import ConfigError, PlannerWarning, RematError, find_error
from compile_remat.inductor.entry import (
    PARTITIONER_OPTION,
    compile_plain,
)
from compile_remat.planning.joint_split import PlannerFailed, warn_of_fallback
from compile_remat.planning.partitioner import RematPartitioner, hash_of_plans, sources_hash
from compile_remat.planning.request import Fit, Request, SharedOption
from compile_remat.planning.settings import Settings, auto_budget, place_of, priced, settings_or_failure, sizes_of
from compile_remat.report import Report
from compile_remat.runtime.oom_recovery import Retrying
from compile_remat.runtime.peak_monitor import Watched, reader_of
from compile_remat.runtime.shared_budget import Ledger, Member

LOG = logging.getLogger("compile_remat")


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
        own, inductor = split_options(_given(options, mode), inductor_options.inductor_option_names())
        _check_inductor(inductor)
        config = RematConfig.resolve(own, modes=inductor_options.mode_names())
        if config.log is not None:
            LOG.setLevel(config.log.upper())
        patches = {**inductor_options.mode_options(config.mode), **inductor, **(config_patches or {})}
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
    sizes = sizes_of(example_inputs)
    settings, reason = settings_or_failure(config, example_inputs)
    settings = priced(settings, gm, example_inputs, config, patches)
    make = functools.partial(
        partitioner_type or RematPartitioner,
        settings,
        sources_hash=sources_hash(),
        plans_hash=hash_of_plans(settings.plan_dir),
        sizes=sizes,
    )
    if not reason:
        try:
            return _compile(gm, example_inputs, config, patches, make(guarded=settings.has_limit(gm)))
        except Exception as error:
            ours, failed = find_error(error, RematError), find_error(error, PlannerFailed)
            if ours is not None:
                raise ours from None
            if failed is None:
                raise
            reason = str(failed)
    warn_of_fallback(reason)
    return _compile(gm, example_inputs, config, patches, make(fallback=reason))


_LEDGERS: dict[tuple[str, str], Ledger] = {}
"""One budget for all graphs of a device: by device and budget, as the user gave it."""


def _ledger_of(config: RematConfig, settings: Settings, example_inputs: Sequence[Any]) -> Ledger | None:
    """Whom this graph shares its budget with; None where there is no budget to share."""
    has_budget = settings.is_given or settings.from_auto
    if not has_budget or settings.budget.kind == "max" or config.check:
        return None
    key = str(place_of(example_inputs)), str(config.memory_budget)
    ledger = _LEDGERS.setdefault(key, Ledger(settings.budget, may_miss=settings.from_auto))
    if not ledger.held_bytes():
        ledger.budget = settings.budget  # `auto` has looked again
        if settings.from_auto and config.optimizer_state.kind != "none":
            without_state = replace(config, optimizer_state=OptimizerState("none"))
            ledger.look = functools.partial(auto_budget, without_state, place_of(example_inputs), 0)
    return ledger


def _first_request(reason: str, config: RematConfig, ledger: Ledger, example_inputs: Sequence[Any]) -> Request:
    """What this graph may take in its first step: `Fit` where it is alone as far as one can see.

    Args:
        reason: Why it will not be.
    """
    others_bytes = ledger.held_bytes()
    instances = config.instances or 0
    if instances < 2 and not others_bytes and (instances or not reason):
        return Fit()
    gradient_bytes = free_memory.trainable_bytes(example_inputs)
    return SharedOption(others_bytes, instances, gradient_bytes, may_miss=ledger.is_provisional)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    patches: Mapping[str, Any],
    partitioner: RematPartitioner,
) -> Callable[..., Any]:
    compilation = Compilation(gm, example_inputs, config, patches)
    reason = company(gm)  # asked of every graph: that marks it as one that is not waited for
    later = None if config.check else compilation.later()
    ledger = None if later is None else _ledger_of(config, partitioner.settings, example_inputs)
    if ledger is not None:
        settings = replace(partitioner.settings, budget=ledger.budget)
        request = _first_request(reason, config, ledger, example_inputs)
        partitioner = replace(partitioner, settings=settings, request=request)
    compiled, reports = compilation.run(partitioner)
    if not reports or reports[-1].plan is None:
        return compiled
    place, report = place_of(example_inputs), reports[-1]
    read = None if config.check else reader_of(place)  # a check runs more than the plan
    watched = functools.partial(Watched, graph_key=report.graph_key, report_dir=config.report_dir, read=read)
    if later is None:
        return watched(compiled)
    retrying = functools.partial(_retrying, later, compilation, partitioner, place)
    if ledger is None:
        return watched(retrying(compiled, report))

    def again(request: Request) -> tuple[Callable[..., Any], Report] | None:
        settings = replace(partitioner.settings, budget=ledger.budget)
        found = later.again(replace(partitioner, settings=settings, request=request))
        return None if found is None else (retrying(*found), found[1])

    return watched(Member(ledger, retrying(compiled, report), report, again, later.publish))


def _retrying(
    later: Later,
    compilation: Compilation,
    partitioner: RematPartitioner,
    place: torch.device,
    compiled: Callable[..., Any],
    report: Report,
) -> Callable[..., Any]:
    """The compiled graph, made to survive running out of memory where that is asked for."""
    if not compilation.config.oom_retry or report.plan is None:
        return compiled
    return Retrying(
        compiled,
        functools.partial(later.lower, partitioner),
        peak_bytes=report.plan.peak_bytes,
        written=compilation.written,
        retries=compilation.config.oom_retry,
        available=functools.partial(free_memory.free_bytes, place, compilation.config.capacity),
        device=place,
        is_lowest=partitioner.settings.budget.kind == "min" and isinstance(partitioner.request, Fit),
    )


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
        problem = inductor_options.inductor_option_problem(name, value)
        if problem:
            raise ConfigError(f"{name} = {value!r} (an option of Inductor): {problem}.")


def _raiser(error: RematError) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail
