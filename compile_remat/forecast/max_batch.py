"""The largest batch of a model that a device can train."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from compile_remat._util.units import format_bytes
from compile_remat.errors import RematError
from compile_remat.forecast.batch_scaling import BatchScaling, TracedStep
from compile_remat.forecast.target_step import BesideGraph
from compile_remat.passes import Plan, Planner, Problem
from compile_remat.passes.memory.plan_timeline import peak_bytes_of

LOG = logging.getLogger("compile_remat")

MOST_SAMPLES = (1 << 31) - 1
"""Upper limit of the search: cuBLAS takes the rows of a product as a 32-bit number."""

STOPPED = f"the search ends at {MOST_SAMPLES:,} samples, the most rows that cuBLAS takes; the device has room for more"

FARTHEST = 8
"""The next guess is at most this multiple of a batch that fits: if gradients dominate the peak, the line is too flat."""

LARGER_BATCHES = (1.3, 1.1)
"""Plans of lowest peak are made for these multiples of the largest batch that fits so far, as long as it grows."""

FAR = 1.5
"""If a plan fits a batch at least this multiple of the batch it was made for, the lowest plan of a larger batch is tried."""


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch whose lowest plan fits the device.

    Attributes:
        batch: 0 if not even one sample fits; None if the batch is not known, for the reason in `why`.
        plan: The plan at that batch.
        total_bytes: Bytes on the device at the peak of that step.
        why: Reason why there is no batch, or why the search ended although the device has room for more; else empty.
    """

    batch: int | None
    plan: Plan | None = None
    total_bytes: int | None = None
    why: str = ""


def nothing_fits(beside: BesideGraph, limit_bytes: int | None) -> MaxBatch | None:
    """Returns the largest batch 0, with a reason, if parameters, gradients and optimizer exceed the limit; else None."""
    least_bytes = beside.fixed_bytes + beside.at_end_bytes
    if limit_bytes is None or least_bytes <= limit_bytes:
        return None
    gradients = ", gradients" if beside.at_end_bytes else ""
    return MaxBatch(0, why=f"parameters{gradients} and the optimizer alone need {format_bytes(least_bytes)}")


def found_or_why(find: Callable[[], MaxBatch]) -> MaxBatch:
    """Returns ``find()``, or if that raises, a `MaxBatch` without a batch and with the error as the reason.

    The forecast has its plan by then, and keeps it even if the builder fails at a larger batch.
    """
    try:
        return find()
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps Ctrl-C during the creation of a class
            raise
        LOG.debug("the search for the largest batch ended with an error", exc_info=True)
        said, _, _ = str(error).partition("\n")
        return MaxBatch(None, why=said if isinstance(error, RematError) else f"{type(error).__name__}: {said}")


def find_max_batch(
    batch: int,
    steps: tuple[TracedStep, TracedStep],
    again: Callable[[int], TracedStep],
    planner_of: Callable[[Problem], Planner],
    beside: BesideGraph,
    limit_bytes: int,
) -> MaxBatch:
    """Bisect over replayed plans of low peak, each made for a larger batch than fits so far; then plan for the batch found.

    A plan has the lowest peak only at the batch that it was made for: if gradients dominate the peak of a small batch, the plan
    saves tensors for which a large batch has no room.  The first plans only narrow the search, so the planner finds them quickly.

    Args:
        steps: The step at `batch`, and at twice that.
        again: Traces the step at another batch.
        planner_of: Makes a planner for the problem of another batch.
    """
    scaling = BatchScaling((batch, 2 * batch), steps)
    if not scaling.is_one_graph:  # torch drops operators if a size is 1: take two larger batches
        scaling = BatchScaling((2 * batch, 3 * batch), (steps[1], again(3 * batch)))
        if not scaling.is_one_graph:
            return MaxBatch(None, why="the graph is another one at another batch")
    search = _Search(scaling, planner_of, beside, limit_bytes)
    start = scaling.batches[1]
    search.look_at(start, is_quick=True)
    for made_for in (start, 1, scaling.batches[0]):
        if not search.most:
            search.look_at(made_for)
    if not search.most:
        return MaxBatch(0, why="one sample does not fit")
    search.look_at(max(search.most + 1, 2 * search.most), is_quick=True)
    for times in LARGER_BATCHES:
        made_for, is_larger = 0, True
        while is_larger and search.most >= FAR * made_for:
            made_for = max(search.most + 1, int(times * search.most))
            is_larger = search.look_at(made_for)
        if not is_larger:
            break
    plan = replace(search.plan(), plain_time_ns=scaling.plain_time_ns_at(search.most))
    at_peak_bytes = max(plan.peak_bytes, beside.at_end_bytes)
    total_bytes = beside.fixed_bytes + scaling.input_bytes_at(search.most) + at_peak_bytes
    return MaxBatch(search.most, plan, total_bytes, STOPPED if search.most == MOST_SAMPLES else "")


class _Search:
    """Search for the largest batch that fits.

    Attributes:
        most: The largest batch that fits so far; 0 if none is known.
    """

    def __init__(
        self, scaling: BatchScaling, planner_of: Callable[[Problem], Planner], beside: BesideGraph, limit_bytes: int
    ) -> None:
        self.scaling, self.beside, self.limit_bytes = scaling, beside, limit_bytes
        self.planner_at = cache(lambda b: planner_of(scaling.at(b)))
        self.most = 0
        self._saved: tuple[str, ...] = ()
        self._again: tuple[str, ...] = ()

    def look_at(self, batch: int, *, is_quick: bool = False) -> bool:
        """Replay a plan made for `batch` at other batches; returns whether a larger batch than before fits under it.

        Args:
            is_quick: True to take a plan of low peak that is found quickly, instead of the lowest.
        """
        batch = min(batch, MOST_SAMPLES)
        if self.most == MOST_SAMPLES:
            return False
        planner = self.planner_at(batch)
        if is_quick:
            saved, again = planner.low(), tuple[str, ...]()
        else:
            lowest = planner.lowest()
            saved, again = lowest.saved, lowest.again

        @cache
        def excess(b: int) -> int:
            peak_bytes = peak_bytes_of(self.scaling.at(b), saved, again)
            return max(peak_bytes, self.beside.at_end_bytes) - self._left_bytes(b)

        fitting = next((b for b in (batch, self.most + 1) if b > self.most and excess(b) <= 0), None)
        if fitting is None:
            return False
        self.most, self._saved, self._again = _most(fitting, excess), saved, again
        return True

    def plan(self) -> Plan:
        """Returns the plan at the largest batch that fits."""
        last, left_bytes = self.planner_at(self.most), self._left_bytes(self.most)
        plan = last.within(left_bytes)
        return plan if plan.is_feasible else last.plan_of(last.mask_of(self._saved), left_bytes, self._again)

    def _left_bytes(self, batch: int) -> int:
        return self.limit_bytes - self.beside.fixed_bytes - self.scaling.input_bytes_at(batch)


def _most(low: int, excess: Callable[[int], int]) -> int:
    """Returns the largest batch, of `MOST_SAMPLES` at most, whose excess is at most 0; the excess of `low` must be.

    A plan's peak is the maximum of many sums that are affine in the batch.  So the zero is guessed by a line through two points,
    which is exact from some batch on; every third guess bisects the interval instead.
    """
    guess, below, turn = min(low + 1, MOST_SAMPLES), excess(low), 0
    while (found := excess(guess)) <= 0:
        if guess == MOST_SAMPLES:
            return guess
        rise, (low, below) = (found - below) / (guess - low), (guess, found)
        guess = min(MOST_SAMPLES, FARTHEST * low, low + int(-below / rise) + 1 if rise > 0 else 2 * low)
    high, beyond = guess, found
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
