"""The largest batch of a model that a device can train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from compile_remat._util.units import format_bytes
from compile_remat.forecast.batch_scaling import Growth, Step
from compile_remat.passes import Plan, Planner, timeline

MOST_BATCHES = 1 << 20
"""Where the search for the largest batch ends."""

BEYOND = (2.0, 1.3, 1.1)
"""A plan of lowest peak is made for so many times the batch that fits so far, one after the other while that gets larger."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch whose lowest plan fits the device.

    Attributes:
        batch: 0 where not even one sample fits; None where it cannot be told, and `why` says so.
        plan: The plan that it would run under.
        total_bytes: What lies on the device at its peak.
    """

    batch: int | None
    plan: Plan | None = None
    total_bytes: int | None = None
    why: str = ""


def hopeless(least_bytes: int, limit_bytes: int | None) -> LargestBatch | None:
    """The answer where nothing fits at any batch: every gradient lives at the end of the backward."""
    if limit_bytes is None or least_bytes <= limit_bytes:
        return None
    return LargestBatch(0, why=f"parameters, gradients and optimizer state alone need {format_bytes(least_bytes)}")


def largest_batch(
    batch: int,
    steps: tuple[Step, Step],
    again: Callable[[int], Step],
    planner: Planner,
    fixed_bytes: int,
    limit_bytes: int,
) -> LargestBatch:
    """Bisection over replayed plans of lowest peak, each made for a batch beyond what fitted; then a plan for the batch found.

    A plan of lowest peak is only that at its own batch: where gradients are most of a small batch's peak, it saves what a large
    batch has no room for.

    Args:
        steps: At `batch`, and at twice that.
        again: Traces another batch.
        planner: Of the first step; its limits hold for all searches.
        fixed_bytes: Parameters and optimizer state.
    """
    growth, lowest = Growth((batch, 2 * batch), steps), planner.lowest()
    if not growth.is_one_graph:  # torch drops operators where a size is 1: take two batches above
        growth = Growth((2 * batch, 3 * batch), (steps[1], again(3 * batch)))
        if not growth.is_one_graph:
            return LargestBatch(None, why="the graph is another one at another batch")
        lowest = planner.on(steps[1].problem).lowest()

    def left_bytes(b: int) -> int:
        return limit_bytes - fixed_bytes - growth.input_bytes_at(b)

    def fits(b: int, plan: Plan) -> bool:
        return timeline(growth.at(b), plan).peak_bytes <= left_bytes(b)

    if not fits(1, lowest):
        lowest = planner.on(growth.at(1)).lowest()
        if not fits(1, lowest):
            return LargestBatch(0, why="one sample does not fit")
    most = _most(1, partial(fits, plan=lowest))
    for times in BEYOND:
        found = planner.on(growth.at(max(most + 1, int(times * most)))).lowest()
        if not fits(most + 1, found):
            break
        lowest, most = found, _most(most + 1, partial(fits, plan=found))
    last = planner.on(growth.at(most))
    plan = last.within(left_bytes(most))
    if not plan.is_feasible:
        plan = last.plan_of(last.mask_of(lowest.saved), left_bytes(most), lowest.again)
    return LargestBatch(most, plan, fixed_bytes + growth.input_bytes_at(most) + plan.peak_bytes)


def _most(low: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, of which `low` is known to."""
    high = 2 * low
    while high <= MOST_BATCHES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
