"""Choice of a device for a model: fit, largest batch and its throughput on each of several devices, from one trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compile_remat._util.collector import collector_paused
from compile_remat._util.frame_chunk import frames_in_one_chunk
from compile_remat._util.progress import Advance, about
from compile_remat.forecast.batch_scaling import TracedStep
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import Traced, kind_of, trace
from compile_remat.forecast.forecasting import effective_budget_of, estimated_plan, prepared_for
from compile_remat.forecast.max_batch import MaxBatch, find_max_batch, found_or_why, nothing_fits
from compile_remat.forecast.target_step import (
    Target,
    beside_graph,
    largest_gradient_bytes,
    ready_on,
    step_on,
    time_note,
)
from compile_remat.passes import Plan

BY_RULES = "a table of devices lowers no graphs; one --device does"
"""The reason why plans in a table of devices are estimates."""


@dataclass(frozen=True)
class DeviceRow:
    """A model on one device; times are the cost model's estimates of forward and backward, without the optimizer's step.

    Attributes:
        limit_bytes: Capacity less the reserve and cuBLAS's workspaces; None if the capacity is not known.
        total_bytes: Bytes on the device at the step's peak, at the requested batch.
        plan: The plan for that batch.
        largest: The largest batch that fits; None if it was not looked for, if the capacity is not known, or if the builder takes
            no batch.
        seq: Tokens of a sequence; None if the builder has no sequences.
        time_note: The assumption behind the times that one setting of torch would change much; empty if there is none.
    """

    device: str
    limit_bytes: int | None
    total_bytes: int
    plan: Plan
    largest: MaxBatch | None
    seq: int | None = None
    time_note: str = ""

    @property
    def fits(self) -> bool | None:
        """True if the requested batch fits; None if the capacity is not known."""
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second at the largest batch; None if there is none."""
        if self.largest is None or self.largest.plan is None or not self.largest.batch:
            return None
        return self.largest.batch * 1e9 / max(1, self.largest.plan.time_ns)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second at the largest batch; None if there is none, or no sequence."""
        samples = self.samples_per_s
        return None if samples is None or self.seq is None else samples * self.seq

    def to_json_data(self) -> dict[str, Any]:
        """Returns all figures except for the plans' tensors, as plain data."""
        largest = self.largest
        planned = None if largest is None else largest.plan
        return {
            "device": self.device,
            "limit_bytes": self.limit_bytes,
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "peak_bytes": self.plan.peak_bytes,
            "step_time_ns": self.plan.time_ns,
            "extra_share": self.plan.extra_share,
            "largest_batch": None if largest is None else largest.batch,
            "largest_batch_total_bytes": None if largest is None else largest.total_bytes,
            "largest_batch_step_time_ns": None if planned is None else planned.time_ns,
            "largest_batch_extra_share": None if planned is None else planned.extra_share,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "why": "" if largest is None else largest.why,
            "time_note": self.time_note,
            "facts": "estimated",
        }


@frames_in_one_chunk
@collector_paused()
def compare_devices(
    builder: Builder,
    targets: Sequence[Target],
    advance: Advance = lambda text="", count=1: None,
    known: Callable[[DeviceRow], object] = lambda row: None,
    *,
    with_max_batch: bool = True,
) -> list[DeviceRow]:
    """Plan one model for several devices.  Devices that run the same kernels share a trace.

    Args:
        advance: Called with a text at the start of each part of the work.
        known: Called with each row when it is there.
        with_max_batch: False to leave out the largest batches, each of which needs a second trace.

    Raises:
        BudgetError: The budget was given in bytes, and no plan fits it.
        RematError: A setting is invalid, or the model cannot be traced.
    """
    traces: dict[tuple[object, int | None], Traced] = {}

    def traced_at(batch: int | None, target: Target) -> Traced:
        key = kind_of(target.figures()), batch
        if key not in traces:
            advance(f"tracing {builder.name}" + ("" if batch is None else f" at batch {batch}"))
            traces[key] = trace(replace(builder, batch=batch), target.figures())
        return traces[key]

    for target in targets:
        target.figures()  # an unknown device raises before the trace
    rows: list[DeviceRow] = []
    start = time.perf_counter()
    for target in targets:
        each_s = (time.perf_counter() - start) / max(1, len(rows))
        advance(
            f"planning for {target.device}, {len(rows) + 1} of {len(targets)}"
            + about(each_s * (len(targets) - len(rows)))
        )
        rows.append(_row(builder, target, traced_at, with_max_batch=with_max_batch))
        known(rows[-1])
    return rows


def _row(
    builder: Builder,
    target: Target,
    traced_at: Callable[[int | None, Target], Traced],
    *,
    with_max_batch: bool,
) -> DeviceRow:
    def step_at(b: int | None) -> TracedStep:
        return step_on(traced_at(b, target), target)

    sizes, limit_bytes = builder.sizes(), target.limit_bytes
    batch = sizes.get("batch")
    traced = traced_at(batch, target)
    largest_bytes = largest_gradient_bytes(traced)
    beside = beside_graph(target, traced.parameter_bytes, traced.trainable_bytes, largest_bytes)
    effective = effective_budget_of(target, limit_bytes, beside.named_bytes(traced.parameter_bytes, traced.input_bytes))
    own = ready_on(traced, target, prepared_for(effective))
    step, planner = own.step, own.planner
    plan = estimated_plan(traced, own, target, effective).plan
    largest = nothing_fits(beside, limit_bytes) if with_max_batch else None
    if with_max_batch and largest is None and batch is not None and limit_bytes is not None:
        largest = found_or_why(
            lambda: find_max_batch(batch, (step, step_at(2 * batch)), step_at, planner.on, beside, limit_bytes)
        )
    total_bytes = beside.fixed_bytes + traced.input_bytes + max(plan.peak_bytes, beside.at_end_bytes)
    return DeviceRow(
        target.figures().name, limit_bytes, total_bytes, plan, largest, sizes.get("seq"), time_note(traced, target)
    )
