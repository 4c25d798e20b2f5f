"""Copies of a set of saved buffers along one step: when each leaves and returns, the peak, and the time that kernels wait.

Both engines serve their copies first come, first served.  A copy to the host starts when its buffer is complete, and the buffer is
released before the first kernel behind its last reader that starts after the copy's end.  If the budget would be exceeded before,
or the forward ends, kernels wait for the copy.  Copies back start in the order of their first readers.  They are planned from the
last one: each ends just before its first reader and before the next copy starts, but starts no earlier than there is room for the
buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.step_curve import Movable, StepCurve
from compile_remat.passes.search.offload.link import Link

SLOWED_PART = 0.01
"""Part of a copy's time by which kernels beside it take longer: about 52 GB/s of 4.5 TB/s, an H200's rates; not measured."""


@dataclass(frozen=True)
class Transfers:
    """Copies of a set of buffers.

    Attributes:
        moved: The buffers, in the order in which they leave.
        releases: For each buffer, the place before which its memory is free; the number of places for the forward's end.
        fetches: For each buffer, the slot before which its memory is taken again.
        peak_bytes: The most bytes live at once on the device.
        stall_ns: Time that kernels wait for copies, and by which copies slow kernels down.
    """

    moved: tuple[Movable, ...]
    releases: tuple[int, ...]
    fetches: tuple[int, ...]
    peak_bytes: int
    stall_ns: int

    @property
    def nbytes(self) -> int:
        """Bytes that leave, and that wait on the host when the forward has ended."""
        return sum(each.nbytes for each in self.moved)


def transfers_of(curve: StepCurve, moved: Sequence[Movable], link: Link, budget_bytes: int) -> Transfers:
    """The copies of some buffers of a step.

    Args:
        moved: In the order of `StepCurve.movable`.
        budget_bytes: Kernels wait for copies rather than exceed it; `Transfers.peak_bytes` exceeds it where waiting does not help.
    """
    releases, forward_peak, out_stall_ns = _leave(curve, moved, link, budget_bytes)
    fetches, backward_peak, back_stall_ns = _return(curve, moved, link, budget_bytes)
    copies_ns = sum(link.out_ns(each.nbytes) + link.back_ns(each.nbytes) for each in moved)
    return Transfers(
        tuple(moved),
        releases,
        fetches,
        max(forward_peak, backward_peak),
        out_stall_ns + back_stall_ns + round(SLOWED_PART * copies_ns),
    )


def _leave(
    curve: StepCurve, moved: Sequence[Movable], link: Link, budget_bytes: int
) -> tuple[tuple[int, ...], int, int]:
    """Returns the places of the releases, the forward's peak, and the time that kernels wait."""
    starts, live = curve.forward_starts_ns.tolist(), curve.forward_live.tolist()
    places, peak, gone, stall_ns, free_ns, queued = [0] * len(moved), 0, 0, 0, 0, 0
    pending: list[tuple[int, int]] = []  # numbers in `moved`, and the ends of their copies
    for place, bytes_live in enumerate(live):
        while queued < len(moved) and moved[queued].made < place:
            made_ns = starts[moved[queued].made + 1] + stall_ns
            free_ns = max(free_ns, made_ns) + link.out_ns(moved[queued].nbytes)
            pending.append((queued, free_ns))
            queued += 1
        left: list[tuple[int, int]] = []
        for number, end_ns in pending:
            buffer, now_ns = moved[number], starts[place] + stall_ns
            is_needed = bytes_live - gone > budget_bytes or place == len(live) - 1
            if buffer.last_read >= place or (end_ns > now_ns and not is_needed):
                left.append((number, end_ns))
                continue
            stall_ns += max(0, end_ns - now_ns)
            places[number], gone = place, gone + buffer.nbytes
        pending = left
        peak = max(peak, bytes_live - gone)
    return tuple(places), peak, stall_ns


def _return(
    curve: StepCurve, moved: Sequence[Movable], link: Link, budget_bytes: int
) -> tuple[tuple[int, ...], int, int]:
    """Returns the slots of the fetches, the backward's peak, and the time that kernels wait."""
    starts, live = curve.backward_starts_ns, curve.backward_live.copy()
    order = sorted(range(len(moved)), key=lambda k: (moved[k].first_read, k))
    for buffer in moved:
        live[: buffer.first_read] -= buffer.nbytes
    latest_ns, slots = dict[int, int](), [0] * len(moved)
    next_ns = int(starts[-1])
    for k in reversed(order):
        next_ns = min(next_ns, int(starts[moved[k].first_read])) - link.back_ns(moved[k].nbytes)
        latest_ns[k] = next_ns
    free_ns = stall_ns = before = 0
    for k in order:
        buffer = moved[k]
        first = max(before, int(np.searchsorted(starts, latest_ns[k], side="right")) - 1)
        first = min(first, buffer.first_read)
        full = np.flatnonzero(live[first : buffer.first_read] + buffer.nbytes > budget_bytes)
        slots[k] = before = first + int(full[-1]) + 1 if len(full) else first
        live[slots[k] : buffer.first_read] += buffer.nbytes
        free_ns = max(free_ns, int(starts[slots[k]]) + stall_ns) + link.back_ns(buffer.nbytes)
        stall_ns += max(0, free_ns - (int(starts[buffer.first_read]) + stall_ns))
    return tuple(slots), int(live.max(initial=0)), stall_ns
