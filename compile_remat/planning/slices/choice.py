"""Chooses one number of slices from those that were planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_remat._util.units import format_bytes
from compile_remat.passes import NotSliced

NUMBERS = (2, 4, 8, 16, 32, 64)
"""The numbers of slices that `auto` tries."""

SAME_PEAK = 0.99
"""Where no plan fits, more slices are taken only if they lower the peak below this share of the best one so far."""


@dataclass(frozen=True)
class Candidate:
    """The figures of a plan by which numbers of slices are compared.

    Attributes:
        peak_bytes: The plan's peak, or if no plan fits, the lowest peak.
        time_ns: The step time without recomputation plus the time above the fastest plan; 0 if no plan fits.
        is_met: True if the plan keeps the requested budget or target; False if the lowest peak is requested.
    """

    peak_bytes: int
    time_ns: int
    is_met: bool


def is_slower(found: Sequence[Candidate]) -> bool:
    """Returns True if more slices help no further: the last plan keeps the budget, and so does one with fewer slices, as fast."""
    times = [plan.time_ns for plan in found if plan.is_met]
    return found[-1].is_met and len(times) > 1 and times[-1] >= times[-2]


def best_of(found: Sequence[Candidate]) -> int:
    """Returns the position of the fastest plan that keeps the budget; if none does, of the lowest plan with the fewest slices."""
    kept = [k for k, plan in enumerate(found) if plan.is_met]
    if kept:
        return min(kept, key=lambda k: found[k].time_ns)
    best = 0
    for k, plan in enumerate(found):
        if plan.peak_bytes < SAME_PEAK * found[best].peak_bytes:
            best = k
    return best


def reasons_of(left: Sequence[NotSliced], *, is_whole: bool) -> str:
    """Returns the reasons why products are not computed in slices; if other rows are, only the refusals of graph outputs.

    Args:
        is_whole: True if no rows of the graph are in slices.
    """
    return "; ".join(_reason_of(refusal) for refusal in left if refusal.is_output or is_whole)


def _reason_of(refusal: NotSliced) -> str:
    if refusal.is_output:
        return f"logits are an output: {format_bytes(refusal.nbytes)} cannot be sliced; return the loss alone"
    return f"{refusal.name}: {format_bytes(refusal.nbytes)} cannot be sliced: {refusal.reason}"
