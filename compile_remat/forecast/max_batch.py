"""The largest batch of a model that a device can train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from compile_remat._util.units import format_bytes
from compile_remat.forecast.batch_scaling import BatchScaling, TracedStep
from compile_remat.passes import Plan, Planner, timeline

MAX_BATCHES = 1 << 20
"""Upper limit of the search."""

LARGER_BATCHES = (2.0, 1.3, 1.1)
"""Lowest-peak plans are made for these multiples of the batch that fits so far, as long as the batch grows."""


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch whose lowest plan fits the device.

    Attributes:
        batch: 0 where not even one sample fits; None where it is not known, for the reason in `why`.
        plan: The plan at that batch.
        total_bytes: Bytes on the device at its peak.
    """

    batch: int | None
    plan: Plan | None = None
    total_bytes: int | None = None
    why: str = ""


def nothing_fits(least_bytes: int, limit_bytes: int | None) -> MaxBatch | None:
    """The answer if no batch fits, else None: at the end of the backward every gradient is live."""
    if limit_bytes is None or least_bytes <= limit_bytes:
        return None
    return MaxBatch(0, why=f"parameters, gradients and optimizer state alone need {format_bytes(least_bytes)}")


def find_max_batch(
    batch: int,
    steps: tuple[TracedStep, TracedStep],
    again: Callable[[int], TracedStep],
    planner: Planner,
    fixed_bytes: int,
    limit_bytes: int,
) -> MaxBatch:
    """Bisect over replayed plans of lowest peak, each made for a larger batch than fitted; then plan for the batch found.

    A plan has the lowest peak only at its own batch: where gradients dominate the peak of a small batch, it saves tensors for
    which a large batch has no room.

    Args:
        steps: At `batch`, and at twice that.
        again: Traces another batch.
        planner: Of the first step; its work budget holds for all searches.
        fixed_bytes: Parameters and optimizer state.
    """
    scaling, lowest = BatchScaling((batch, 2 * batch), steps), planner.lowest()
    if not scaling.is_one_graph:  # torch drops operators where a size is 1: take two batches above
        scaling = BatchScaling((2 * batch, 3 * batch), (steps[1], again(3 * batch)))
        if not scaling.is_one_graph:
            return MaxBatch(None, why="the graph is another one at another batch")
        lowest = planner.on(steps[1].problem).lowest()

    def left_bytes(b: int) -> int:
        return limit_bytes - fixed_bytes - scaling.input_bytes_at(b)

    def fits(b: int, plan: Plan) -> bool:
        return timeline(scaling.at(b), plan).peak_bytes <= left_bytes(b)

    if not fits(1, lowest):
        lowest = planner.on(scaling.at(1)).lowest()
        if not fits(1, lowest):
            return MaxBatch(0, why="one sample does not fit")
    most = _most(1, partial(fits, plan=lowest))
    for times in LARGER_BATCHES:
        found = planner.on(scaling.at(max(most + 1, int(times * most)))).lowest()
        if not fits(most + 1, found):
            break
        lowest, most = found, _most(most + 1, partial(fits, plan=found))
    last = planner.on(scaling.at(most))
    plan = last.within(left_bytes(most))
    if not plan.is_feasible:
        plan = last.plan_of(last.mask_of(lowest.saved), left_bytes(most), lowest.again)
    return MaxBatch(most, plan, fixed_bytes + scaling.input_bytes_at(most) + plan.peak_bytes)


def _most(low: int, fits: Callable[[int], bool]) -> int:
    """The largest number for which `fits` holds; it holds for `low`."""
    high = 2 * low
    while high <= MAX_BATCHES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
