"""Copies of a set of saved buffers along one step: when each leaves and returns, the peak, and the time that kernels wait.

Both engines serve their copies first come, first served.  A copy to the host starts when its buffer is complete, and the buffer is
released before the first kernel behind its last reader that starts after the copy's end.  If the budget would be exceeded before,
or the forward ends, kernels wait for the copy.  Copies back start in the order of their first readers.  They are planned from the
last one: each ends just before its first reader and before the next copy starts, but starts no earlier than there is room for the
buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.buffers import Ints
from compile_remat.passes.memory.step_curve import Movable, StepCurve
from compile_remat.passes.search.offload.link import Link


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

    def host_bytes(self, link: Link) -> int:
        """Bytes of host memory that they take."""
        return sum(link.held_bytes(each.nbytes) for each in self.moved)


def transfers_of(curve: StepCurve, moved: Sequence[Movable], link: Link, budget_bytes: int) -> Transfers:
    """The copies of some buffers of a step.

    Args:
        moved: In the order of `StepCurve.movable`.
        budget_bytes: Kernels wait for copies rather than exceed it; `Transfers.peak_bytes` exceeds it where waiting does not help.
    """
    if not moved:
        peak_bytes = max(int(curve.forward_live.max()), int(curve.backward_live.max(initial=0)))
        return Transfers((), (), (), peak_bytes, 0)
    releases, forward_peak, out_stall_ns = _leave(curve, moved, link, budget_bytes)
    fetches, backward_peak, back_stall_ns = _return(curve, moved, link, budget_bytes)
    copies_ns = sum(link.out_ns(each.nbytes) + link.back_ns(each.nbytes) for each in moved)
    return Transfers(
        tuple(moved),
        releases,
        fetches,
        max(forward_peak, backward_peak),
        out_stall_ns + back_stall_ns + round(link.slowed_part * copies_ns),
    )


def _leave(
    curve: StepCurve, moved: Sequence[Movable], link: Link, budget_bytes: int
) -> tuple[tuple[int, ...], int, int]:
    """Returns the places of the releases, the forward's peak, and the time that kernels wait."""
    starts, live = curve.forward_starts_ns.copy(), curve.forward_live
    made, last_read, nbytes, out_ns = _columns(
        (each.made, each.last_read, each.nbytes, link.out_ns(each.nbytes)) for each in moved
    )
    end, first, ones = len(live) - 1, 0, np.ones(len(moved), dtype=np.int64)
    begun_ns = starts[made + 1]  # copies are in the queue from these times on
    while True:
        ends_ns = served(begun_ns, out_ns)
        places = np.minimum(np.maximum(last_read + 1, np.searchsorted(starts, ends_ns)), end)
        left = live - _up_to(places, nbytes, len(live))
        pending = _up_to(last_read + 1, ones, len(live)) > _up_to(places, ones, len(live))
        over = np.flatnonzero((left > budget_bytes)[first:end] & pending[first:end])
        if not len(over):
            break
        first += int(over[0])  # kernels wait here for the first of the copies that can be released
        late = int(np.flatnonzero((last_read < first) & (places > first))[0])
        starts[first:] += ends_ns[late] - starts[first]
        begun_ns = np.where(made >= first, starts[made + 1], begun_ns)
    waited_ns = int(starts[-1] - curve.forward_starts_ns[-1])
    last_ns = max(0, int(ends_ns.max(initial=0) - starts[-1]))
    return tuple(places.tolist()), int(left.max()), waited_ns + last_ns


def _return(
    curve: StepCurve, moved: Sequence[Movable], link: Link, budget_bytes: int
) -> tuple[tuple[int, ...], int, int]:
    """Returns the slots of the fetches, the backward's peak, and the time that kernels wait."""
    starts = curve.backward_starts_ns
    first_read, nbytes, back_ns = _columns((each.first_read, each.nbytes, link.back_ns(each.nbytes)) for each in moved)
    order = np.argsort(first_read, kind="stable")
    first_read, nbytes, back_ns = first_read[order], nbytes[order], back_ns[order]
    live = curve.backward_live - (nbytes.sum() - _up_to(first_read, nbytes, len(curve.backward_live)))
    ended_ns = served(-starts[first_read[::-1]], back_ns[::-1])[::-1]  # the latest starts, on a clock that runs back
    wanted = np.searchsorted(starts, -ended_ns, side="right") - 1
    slots, free_ns, stall_ns, before = [0] * len(moved), 0, 0, 0
    for k, last, size, time_ns, first in zip(
        *(each.tolist() for each in (order, first_read, nbytes, back_ns, wanted)), strict=True
    ):
        first = min(max(before, first), last)
        full = np.flatnonzero(live[first:last] > budget_bytes - size)
        slots[k] = before = first + int(full[-1]) + 1 if len(full) else first
        live[before:last] += size
        free_ns = max(free_ns, int(starts[before]) + stall_ns) + time_ns
        stall_ns += max(0, free_ns - (int(starts[last]) + stall_ns))
    return tuple(slots), int(live.max(initial=0)), stall_ns


def _columns(rows: Iterable[tuple[int, ...]]) -> Ints:
    """The rows as an array of columns, [columns, rows]; at least one row."""
    return np.array(list(rows), dtype=np.int64).T


def served(begun_ns: Ints, times_ns: Ints) -> Ints:
    """Ends of copies that one engine serves in order: each starts when it is in the queue and the one before has ended."""
    total_ns = np.cumsum(times_ns)
    return np.asarray(total_ns + np.maximum.accumulate(begun_ns - (total_ns - times_ns)))


def _up_to(places: Ints, nbytes: Ints, size: int) -> Ints:
    """The bytes of all buffers whose place is not behind each of `size` places."""
    return np.cumsum(np.bincount(places, nbytes, minlength=size)[:size]).astype(np.int64)
