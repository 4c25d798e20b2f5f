"""The largest batch of a model that a device can train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from compile_remat._util.units import format_bytes
from compile_remat.forecast.batch_scaling import BatchScaling, TracedStep
from compile_remat.forecast.target_step import BesideGraph
from compile_remat.passes import Plan, Planner, timeline

MAX_BATCHES = 1 << 20
"""Upper limit of the search."""

FARTHEST = 8
"""How many times as far as what fits the next number may lie: where gradients dominate the peak, the line is too flat."""

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


def nothing_fits(beside: BesideGraph, limit_bytes: int | None) -> MaxBatch | None:
    """The answer if no batch fits, else None."""
    least_bytes = beside.fixed_bytes + beside.at_end_bytes
    if limit_bytes is None or least_bytes <= limit_bytes:
        return None
    gradients = ", gradients" if beside.at_end_bytes else ""
    return MaxBatch(0, why=f"parameters{gradients} and the optimizer alone need {format_bytes(least_bytes)}")


def find_max_batch(
    batch: int,
    steps: tuple[TracedStep, TracedStep],
    again: Callable[[int], TracedStep],
    planner: Planner,
    beside: BesideGraph,
    limit_bytes: int,
) -> MaxBatch:
    """Bisect over replayed plans of lowest peak, each made for a larger batch than fitted; then plan for the batch found.

    A plan has the lowest peak only at its own batch: where gradients dominate the peak of a small batch, it saves tensors for
    which a large batch has no room.

    Args:
        steps: At `batch`, and at twice that.
        again: Traces another batch.
        planner: Of the first step; its work budget holds for all searches.
    """
    scaling, lowest = BatchScaling((batch, 2 * batch), steps), planner.lowest()
    if not scaling.is_one_graph:  # torch drops operators where a size is 1: take two batches above
        scaling = BatchScaling((2 * batch, 3 * batch), (steps[1], again(3 * batch)))
        if not scaling.is_one_graph:
            return MaxBatch(None, why="the graph is another one at another batch")
        lowest = planner.on(steps[1].problem).lowest()

    def left_bytes(b: int) -> int:
        return limit_bytes - beside.fixed_bytes - scaling.input_bytes_at(b)

    def excess_of(plan: Plan) -> Callable[[int], int]:
        return cache(lambda b: max(timeline(scaling.at(b), plan).peak_bytes, beside.at_end_bytes) - left_bytes(b))

    excess = excess_of(lowest)
    if excess(1) > 0:
        lowest = planner.on(scaling.at(1)).lowest()
        excess = excess_of(lowest)
        if excess(1) > 0:
            return MaxBatch(0, why="one sample does not fit")
    most = _most(1, excess)
    for times in LARGER_BATCHES:
        found = planner.on(scaling.at(max(most + 1, int(times * most)))).lowest()
        excess = excess_of(found)
        if excess(most + 1) > 0:
            break
        lowest, most = found, _most(most + 1, excess)
    last = planner.on(scaling.at(most))
    plan = last.within(left_bytes(most))
    if not plan.is_feasible:
        plan = last.plan_of(last.mask_of(lowest.saved), left_bytes(most), lowest.again)
    at_peak_bytes = max(plan.peak_bytes, beside.at_end_bytes)
    return MaxBatch(most, plan, beside.fixed_bytes + scaling.input_bytes_at(most) + at_peak_bytes)


def _most(low: int, excess: Callable[[int], int]) -> int:
    """The largest number whose excess is not above 0, as that of `low` is not.

    A plan's peak is the largest of many sums that are affine in the batch, so the zero is guessed by a line through two numbers,
    which is exact from some batch on; every third number halves what is left, whatever the line says.
    """
    guess, below, turn = 2 * low, excess(low), 0
    while guess <= MAX_BATCHES and (found := excess(guess)) <= 0:
        rise, (low, below) = (found - below) / (guess - low), (guess, found)
        guess = min(FARTHEST * low, low + int(-below / rise) + 1) if rise > 0 else 2 * low
    high, beyond = guess, found if guess <= MAX_BATCHES else 0
    while high - low > 1:
        turn += 1
        middle = (low + high) // 2
        if turn % 3 and beyond > 0:
            middle = min(high - 1, max(low + 1, low + (high - low) * -below // (beyond - below)))
        found = excess(middle)
        if found <= 0:
            low, below = middle, found
        else:
            high, beyond = middle, found
    return low
