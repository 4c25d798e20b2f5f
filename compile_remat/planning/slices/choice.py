"""Which number of slices is taken, of those that were planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_remat._util.units import format_bytes
from compile_remat.passes import NotSliced

NUMBERS = (2, 4, 8, 16, 32, 64)
"""The numbers of slices that `auto` tries."""

SAME_PEAK = 0.99
"""More slices have to lower a minimum peak by more than this to be taken."""


@dataclass(frozen=True)
class Candidate:
    """What decides between plans with different numbers of slices.

    Attributes:
        peak_bytes: The plan's peak, or where no plan fits, the lowest one.
        time_ns: Of the step.
        is_met: Whether the plan keeps what was asked; never where the lowest is asked for.
    """

    peak_bytes: int
    time_ns: int
    is_met: bool


def is_slower(found: Sequence[Candidate]) -> bool:
    """Whether the last plan keeps what was asked, as one with fewer slices does in less time: more slices help no further."""
    times = [plan.time_ns for plan in found if plan.is_met]
    return found[-1].is_met and len(times) > 1 and times[-1] >= times[-2]


def best_of(found: Sequence[Candidate]) -> int:
    """The position of the fastest plan that keeps what was asked, or where none does, of the lowest with the fewest slices."""
    kept = [k for k, plan in enumerate(found) if plan.is_met]
    if kept:
        return min(kept, key=lambda k: found[k].time_ns)
    best = 0
    for k, plan in enumerate(found):
        if plan.peak_bytes < SAME_PEAK * found[best].peak_bytes:
            best = k
    return best


def reasons_of(left: Sequence[NotSliced], *, is_whole: bool) -> str:
    """Why rows are not in slices: where none are, all reasons, else only that the caller gets them.

    Args:
        is_whole: Whether no rows are.
    """
    return "; ".join(_reason_of(refusal) for refusal in left if refusal.is_output or is_whole)


def _reason_of(refusal: NotSliced) -> str:
    if refusal.is_output:
        return f"logits are an output: {format_bytes(refusal.nbytes)} cannot be sliced; return the loss alone"
    return f"{refusal.name}: {format_bytes(refusal.nbytes)} cannot be sliced: {refusal.reason}"
