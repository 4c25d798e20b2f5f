"""Which buffers of one plan leave: those that the forward completes first, as they leave first and are read last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from compile_remat.passes.memory.buffers import Ints
from compile_remat.passes.memory.step_curve import Movable, StepCurve
from compile_remat.passes.search.offload.link import Link
from compile_remat.passes.search.offload.transfers import Transfers, served, transfers_of

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: the fixed cost of a copy outweighs them."""


def large_enough(curve: StepCurve) -> list[Movable]:
    """The buffers of a step that may leave."""
    return [each for each in curve.movable if each.nbytes >= LEAST_BYTES]


def first_of(buffers: Sequence[Movable], link: Link) -> list[Movable]:
    """The first buffers, as many as the host has room for."""
    ends = np.cumsum([link.held_bytes(each.nbytes) for each in buffers])
    return list(buffers[: int(np.searchsorted(ends, link.host_bytes, side="right"))])


def taken_away(curve: StepCurve, link: Link, stays: Collection[int] = ()) -> list[Movable]:
    """The first buffers, but those of some values, whose copies end in the forward and for which the host has room."""
    buffers = [each for each in large_enough(curve) if each.value not in stays]
    buffers = first_of(buffers, link)
    if not buffers:
        return []
    _, ends_ns = queue(curve, buffers, link)
    return buffers[: int(np.searchsorted(ends_ns, curve.forward_starts_ns[-1], side="right"))]


def queue(curve: StepCurve, buffers: Sequence[Movable], link: Link) -> tuple[Ints, Ints]:
    """The times from which the copies of some buffers wait for the engine, and their ends, if no kernel waits; at least one."""
    begun_ns = curve.forward_starts_ns[[each.made + 1 for each in buffers]]
    return begun_ns, served(begun_ns, np.array([link.out_ns(each.nbytes) for each in buffers], dtype=np.int64))


def fewest(curve: StepCurve, movable: Sequence[Movable], link: Link, budget_bytes: int) -> Transfers | None:
    """Copies of few of some buffers that keep the budget; None if no set is found within it and the host's memory."""

    def made(moved: Sequence[Movable]) -> Transfers:
        return transfers_of(curve, moved, link, budget_bytes)

    low, high = 0, len(movable)
    if made(movable).peak_bytes > budget_bytes:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if made(movable[:middle]).peak_bytes <= budget_bytes else (middle + 1, high)
    best = made(movable[:high])
    if best.peak_bytes > budget_bytes:  # the peak is not monotone in the number of buffers
        best = made(movable)
    best = _without_needless(curve, best, made, budget_bytes)
    return best if best.moved and best.host_bytes(link) <= link.host_bytes else None


def _without_needless(
    curve: StepCurve, best: Transfers, made: Callable[[Sequence[Movable]], Transfers], budget_bytes: int
) -> Transfers:
    """The copies without those that the budget does not need, from the last one on."""
    all_bytes = max(int(curve.forward_live[-1]), int(curve.backward_live[0]))
    for each in reversed(best.moved):
        if all_bytes - best.nbytes + each.nbytes > budget_bytes:
            continue  # it is away between forward and backward
        fewer = made([other for other in best.moved if other is not each])
        if fewer.peak_bytes <= budget_bytes and fewer.stall_ns <= best.stall_ns:
            best = fewer
    return best
