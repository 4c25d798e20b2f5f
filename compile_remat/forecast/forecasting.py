"""Forecast of training on a device that need not be present: memory, time, plan, and the largest batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from compile_remat._util.collector import collector_paused
from compile_remat._util.frame_chunk import frames_in_one_chunk
from compile_remat._util.progress import Advance, about
from compile_remat._util.units import format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.errors import BudgetError
from compile_remat.forecast.baselines import TORCH_BUDGETS, Baseline, compare, hand_written, offloading, saved_by_torch
from compile_remat.forecast.batch_scaling import TracedStep
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import Traced, built, model_bytes, refuse, trace
from compile_remat.forecast.lowering.elsewhere import lowered_for
from compile_remat.forecast.lowering.observing import Asked, NotObserved, Observed, facts_text, with_attention_of
from compile_remat.forecast.max_batch import MaxBatch, find_max_batch, found_or_why, nothing_fits
from compile_remat.forecast.second_process import Surroundings, Worker
from compile_remat.forecast.target_step import (
    LOWEST_PEAK,
    BesideGraph,
    Ready,
    Target,
    beside_graph,
    context_of,
    largest_gradient_bytes,
    optimizer_workspace_bytes,
    ready_on,
    step_of,
    time_note,
)
from compile_remat.pages.figures import PageFigures
from compile_remat.pages.viewable import Viewable
from compile_remat.passes import Plan, Planner, plain_time_ns
from compile_remat.planning.budget_source import EffectiveBudget, source_of
from compile_remat.planning.joint_planning import Planned
from compile_remat.planning.pipeline import plan_graph
from compile_remat.planning.request import Fit
from compile_remat.planning.settings import SLICES

SEARCH_SHARE, BATCH_SHARE = 0.6, 1.2
"""Times of the search for a plan, and of that for the largest batch, as shares of the time of the trace; for progress alone.

Of ResNet-50 they took 0.59 and 0.69 of it, of twelve linear layers 0.50 and 1.45.
"""


@dataclass(frozen=True)
class Forecast(Viewable):
    """Memory and time of one training step on a device.

    Attributes:
        model: Name of the builder.
        sizes: The batch, and what else the builder takes, such as `seq`.
        device: Name of the device.
        dtype: Dtype of the parameters, such as `bf16`; `as built` for a builder's own.
        optimizer: The setting `optimizer_state`.
        parameter_bytes: Bytes of parameters and buffers.
        optimizer_bytes: Bytes of the optimizer's state.
        input_bytes: Bytes of the model's inputs.
        gradient_bytes: Bytes of all gradients of parameters.  The backward makes these, so they are part of the region peak.
        optimizer_workspace_bytes: Workspace of the optimizer's step, after the backward, or during it with early gradients.
        limit_bytes: Capacity less the reserve and cuBLAS's workspaces; None if the device has no known capacity.
        plan: The plan within the budget.
        floor_bytes: The lowest reachable region peak.
        message: Difference between the plan and the request; empty if there is none.
        largest_batch: The largest batch, if requested.
        compared: Baselines, if requested.
        gradients: The setting `gradients`.
        seconds: Wall time of the forecast.
        plain_peak_bytes: The region peak of plain torch.compile, if requested.
        observed_peak_bytes: The plan's region peak as read from its graphs after Inductor lowered them; None for an estimate.
        why: Reason why the plan is an estimate, and a remedy; empty if the plan's peak was observed.
        time_note: The assumption behind the times that one setting of torch would change much; empty if there is none.
    """

    model: str
    sizes: dict[str, int]
    device: str
    dtype: str
    optimizer: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    limit_bytes: int | None
    plan: Plan
    floor_bytes: int
    message: str = ""
    largest_batch: MaxBatch | None = None
    compared: tuple[Baseline, ...] = ()
    seconds: float = 0.0
    plain_peak_bytes: int | None = None
    optimizer_workspace_bytes: int = 0
    gradients: str = "end"
    observed_peak_bytes: int | None = None
    why: str = ""
    time_note: str = ""

    @property
    def facts(self) -> str:
        """Origin of the plan's bytes: `observed` in its lowered graphs, or `estimated` by rules."""
        return "estimated" if self.observed_peak_bytes is None else "observed"

    @property
    def peak_bytes(self) -> int:
        """The region peak: the observed one, else the estimated one."""
        return self.observed_peak_bytes or self.plan.peak_bytes

    @property
    def facts_text(self) -> str:
        """`facts` as a line of text, with the reason for an estimate."""
        return facts_text(self.why)

    @property
    def total_bytes(self) -> int:
        """Bytes on the device at the step's peak: within forward and backward, or in the optimizer's step after them."""
        beside_bytes = self.parameter_bytes + self.optimizer_bytes + self.input_bytes
        if self.gradients == "early":
            return beside_bytes + self.optimizer_workspace_bytes + self.peak_bytes
        return beside_bytes + max(self.peak_bytes, self.gradient_bytes + self.optimizer_workspace_bytes)

    @property
    def peak_moment(self) -> str:
        """The part of the step in which the device holds `total_bytes`."""
        at_end_bytes = self.gradient_bytes + self.optimizer_workspace_bytes
        is_at_end = self.gradients == "end" and at_end_bytes > self.peak_bytes
        return "the optimizer's step" if is_at_end else "forward and backward"

    @property
    def fits(self) -> bool | None:
        """True if `total_bytes` is within the device's limit; None if the limit is not known."""
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes

    @property
    def step_time_ns(self) -> int:
        """Estimated time of forward and backward under the plan."""
        return self.plan.time_ns

    @property
    def gradient_facts(self) -> list[tuple[str, str]]:
        """Rows of a table about the gradients and the optimizer's step: names and values."""
        workspace = format_bytes(self.optimizer_workspace_bytes)
        if self.gradients == "early":
            return [("optimizer workspace, for the largest parameter", workspace)]
        gradients = "gradients, part of the peak", format_bytes(self.gradient_bytes)
        return [gradients, ("optimizer's step behind it, beside gradients", workspace)]

    def figures(self, points: int = 0) -> PageFigures:
        """Returns the figures of a page about the forecast, with a frontier of `points` budgets."""
        base = self.plan.figures(points)
        plain = () if self.plain_peak_bytes is None else (("plain torch.compile", self.plain_peak_bytes),)
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        facts = [
            ("parameters", format_bytes(self.parameter_bytes)),
            (f"optimizer state ({self.optimizer})", format_bytes(self.optimizer_bytes)),
            ("inputs", format_bytes(self.input_bytes)),
            *self.gradient_facts,
            ("sum", format_bytes(self.total_bytes)),
            ("the step's peak is in", self.peak_moment),
            ("region peak", self.facts_text),
        ]
        if self.limit_bytes is not None:
            facts.append(("capacity less the reserve", format_bytes(self.limit_bytes)))
        return replace(
            base,
            title=f"{self.model} ({sizes}; {self.dtype}) on {self.device}",
            peaks=(*plain, *base.peaks),
            floor_bytes=self.floor_bytes,
            facts=(*facts, *base.facts),
            notes=tuple(filter(None, (self.message, *base.notes))),
        )

    def to_json(self) -> str:
        """Returns all figures, with the plan and the baselines, as JSON text."""
        data = asdict(self)
        data["plan"] = json.loads(self.plan.to_json())
        data["compared"] = [{**asdict(c), "ours": json.loads(c.ours.to_json())} for c in self.compared]
        if self.largest_batch is not None and self.largest_batch.plan is not None:
            data["largest_batch"]["plan"] = json.loads(self.largest_batch.plan.to_json())
        names = ("total_bytes", "fits", "step_time_ns", "facts", "peak_bytes")
        figures = {name: getattr(self, name) for name in names}
        return json.dumps({**data, **figures}, indent=1)


@frames_in_one_chunk
@collector_paused()
def forecast(
    builder: Builder,
    target: Target,
    *,
    with_baselines: bool = False,
    with_max_batch: bool = True,
    needs_max_batch: bool = False,
    worker: Worker | None = None,
    with_plain: bool = False,
    advance: Advance = lambda text="", count=1: None,
    known: Callable[[Forecast], object] = lambda found: None,
) -> Forecast:
    """Trace a step, plan it and, if requested, compare it and find the largest batch.  Allocates no tensor data, runs no step.

    The plan's graphs are lowered and read if that is possible (`lowering`); the largest batch and the baselines are planned by
    rules.

    Args:
        with_baselines: Also evaluate common checkpointing schemes, see `baselines`.
        with_max_batch: Also find the largest batch that fits; needs a second trace.  Ignored with rows in slices.
        needs_max_batch: Raise the error of that search; else `Forecast.largest_batch` holds its reason.
        worker: Process that finds the largest batch meanwhile; the builder must then be a name.
        with_plain: Also give the peak of plain torch.compile, under any budget; the plan stays the same.
        advance: Called with a text at the start of each part of the work.
        known: Called with the forecast when the plan is known, then when the baselines are, then when the largest batch is; the
            later parts are missing in the earlier calls.

    Raises:
        BudgetError: The budget was given, and no plan fits it.
        RematError: A setting is invalid, or the model cannot be traced.
    """
    start, surroundings = time.perf_counter(), None if worker is None else Surroundings.now()
    with lowered_for(target) as lowering:
        device, limit = target.figures(), target.limit_bytes
        model = built(builder)
        parameter_bytes, trainable_bytes, input_bytes = model_bytes(*model)
        state_bytes = target.optimizer.of(trainable_bytes)
        search = with_max_batch and "batch" in builder.sizes() and limit is not None and target.slices == "off"
        beside = beside_graph(target, parameter_bytes, trainable_bytes, 0)  # the largest parameter is not known yet
        largest = nothing_fits(beside, limit) if search else None
        search = search and largest is None
        if search and worker is not None and surroundings is not None:
            worker.begin(surroundings, largest_batch, builder, target)
        advance(f"tracing {builder.name}")
        before_trace = time.perf_counter()
        traced = trace(builder, device, model=model)
        traced_s = time.perf_counter() - before_trace
        largest_bytes = largest_gradient_bytes(traced)
        workspace_bytes = optimizer_workspace_bytes(target, trainable_bytes, largest_bytes)
        beside = beside_graph(target, parameter_bytes, trainable_bytes, largest_bytes)
        effective = effective_budget_of(target, limit, beside.named_bytes(parameter_bytes, input_bytes))
        lowering.begin(Asked(builder, target, effective.budget, target.budget.kind == "auto", with_plain))
        advance("building the planning problem")
        torch_budgets = TORCH_BUDGETS if with_baselines else (1.0,)
        own = ready_on(traced, target, prepared_for(effective), torch_budgets)
        if search and worker is not None:
            worker.send((own.step, beside))
        if lowering.is_there:
            advance("waiting for its graphs to be lowered")
        outcome = with_attention_of(lowering.result(), own.problem)
    if isinstance(outcome, BudgetError):
        raise outcome
    if isinstance(outcome, Observed):
        needs_plain = with_plain or effective.budget.kind in ("max", "fraction")
        planned = _observed(outcome, with_plain=needs_plain)
    else:
        advance("searching for a plan, and for the lowest one" + about(SEARCH_SHARE * traced_s))
        planned = _estimated(traced, own, target, effective, outcome, with_plain=with_plain)
    found = Forecast(
        model=builder.name,
        sizes=builder.sizes(),
        device=device.name,
        gradients=target.gradients,
        dtype=builder.dtype_name,
        optimizer=str(target.optimizer),
        parameter_bytes=parameter_bytes,
        gradient_bytes=trainable_bytes,
        optimizer_bytes=state_bytes,
        optimizer_workspace_bytes=workspace_bytes,
        input_bytes=input_bytes,
        limit_bytes=limit,
        plan=planned.plan,
        floor_bytes=planned.floor_bytes,
        message=planned.message,
        seconds=time.perf_counter() - start,
        plain_peak_bytes=planned.plain_peak_bytes,
        observed_peak_bytes=planned.observed_peak_bytes,
        why=planned.why,
        time_note=time_note(traced, target),
    )
    known(found)
    if with_baselines:
        advance("comparing with what people do today" + about(SEARCH_SHARE * traced_s))
        planner = Planner(own.with_torch, target.time_limit, link=own.planner.link)
        graph = own.prepared.joint.module.graph
        masks = hand_written(planner.problem, graph) | saved_by_torch(own.prepared)
        moved = offloading(planner.problem, graph, masks)
        found = replace(found, compared=tuple(compare(planner, masks, plain_time_ns(own.with_torch), moved)))
        known(found)
    if search:
        advance("looking for the largest batch" + about(BATCH_SHARE * traced_s))
        here = partial(largest_batch, lambda: (own.step, beside), builder, target)
        find = here if worker is None else worker.result
        largest = find() if needs_max_batch else found_or_why(find)
    if largest is not None:
        found = replace(found, largest_batch=largest)
        known(found)
    return replace(found, seconds=time.perf_counter() - start)


# -- the plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlanOfStep:
    """A plan, and the fields of a `Forecast` that depend on it."""

    plan: Plan
    floor_bytes: int
    message: str
    plain_peak_bytes: int | None
    observed_peak_bytes: int | None = None
    why: str = ""


def _observed(outcome: Observed, *, with_plain: bool) -> _PlanOfStep:
    report = outcome.report
    assert report.plan is not None
    floor_bytes = report.floor_bytes or Planner(outcome.problem).lowest().peak_bytes
    plain = report.plain if with_plain else None
    plain_peak_bytes = None if plain is None else plain.peak_bytes
    return _PlanOfStep(report.plan, floor_bytes, report.message, plain_peak_bytes, outcome.peak_bytes)


def _estimated(
    traced: Traced,
    own: Ready,
    target: Target,
    effective: EffectiveBudget,
    reason: NotObserved,
    *,
    with_plain: bool,
) -> _PlanOfStep:
    """Returns the plan whose peak is estimated by rules.

    Raises:
        BudgetError: No plan fits.
    """
    is_max = effective.budget.kind == "max"
    planned = estimated_plan(traced, own, target, effective, with_plain=with_plain or is_max, with_floor=not is_max)
    report = planned.report
    floor_bytes = own.planner.lowest().peak_bytes if is_max else report.floor_bytes
    assert floor_bytes is not None
    plain_peak_bytes = None if report.plain is None else report.plain.peak_bytes
    return _PlanOfStep(planned.plan, floor_bytes, report.message, plain_peak_bytes, why=str(reason))


def estimated_plan(traced: Traced, own: Ready, target: Target, effective: EffectiveBudget, **facts: Any) -> Planned:
    """Returns the plan of a traced step by rules.

    Args:
        own: The step, ready for the budget `prepared_for(effective)`.
        facts: Fields of the `PlanContext`.

    Raises:
        BudgetError: No plan fits.
        RematError: Nothing in the graph has a gradient.
    """
    settings = target.settings(effective.budget, from_auto=target.budget.kind == "auto")
    context = context_of(traced, target, source=effective.source, **facts)
    if effective.budget.kind in SEARCHED and not context.with_plain and settings.slices == SLICES["off"]:
        planned = plan_graph(traced.given, settings, Fit(), context, replace(own.prepared, effective=effective))
    else:
        planned = plan_graph(traced.copied(), settings, Fit(), context)
    return refuse(0, traced.name) if planned is None else planned


# -- the budget ---------------------------------------------------------------------------------------------------------


SEARCHED = ("bytes", "min")
"""Budgets for which a step is prepared alike: without the plan of plain torch.compile."""


def prepared_for(effective: EffectiveBudget) -> MemoryBudget:
    """Returns the budget for which a step is made ready: its own, unless that needs the plan of plain torch.compile."""
    return effective.budget if effective.budget.kind in SEARCHED else LOWEST_PEAK


def effective_budget_of(target: Target, limit_bytes: int | None, others: Mapping[str, int]) -> EffectiveBudget:
    """Returns the budget in a form that the planner knows: `auto` becomes the bytes that others leave of the limit.

    Args:
        others: Names and bytes of what else the device holds, for messages.
    """
    if target.budget.kind != "auto":
        return EffectiveBudget(target.budget, source=source_of(target.budget, from_auto=False))
    if limit_bytes is None:
        return EffectiveBudget(MemoryBudget("max"))
    *first, last = (f"{name} ({format_bytes(nbytes)})" for name, nbytes in others.items())
    source = (
        f"the memory that {target.device} has left of {format_bytes(limit_bytes)} beside {', '.join(first)} and {last}"
    )
    return EffectiveBudget(MemoryBudget("bytes", max(1, limit_bytes - sum(others.values()))), source=source)


# -- the largest batch ----------------------------------------------------------------------------------------------------


@frames_in_one_chunk
@collector_paused()
def largest_batch(first: Callable[[], tuple[TracedStep, BesideGraph]], builder: Builder, target: Target) -> MaxBatch:
    """Returns the largest batch that the target can train, searched in this process.

    Args:
        first: Waits for the step at the builder's batch, and for the bytes that the device holds beside its graph.
    """
    batch, limit = builder.sizes()["batch"], target.limit_bytes
    assert limit is not None

    def step_at(b: int) -> TracedStep:
        return step_of(replace(builder, batch=b), target)

    grown = step_at(2 * batch)
    step, beside = first()
    return find_max_batch(
        batch, (step, grown), step_at, lambda problem: Planner(problem, target.time_limit), beside, limit
    )
