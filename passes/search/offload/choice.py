"""Chooses the saved values that wait on the host, together with the plan that saves them.

A plan for a larger budget recomputes less, and the link takes away the bytes by which it exceeds the budget.  So plans are made for
budgets up to the bytes that the link can take away during the forward.  Such a plan may save most where the link has no time left:
of 100 linear layers it recomputed the first half.  So others are made around the buffers that a larger plan completes first, as if
they took no memory while they are away (`absent`).  From each plan the fewest buffers are moved that keep the budget: those that
the forward completes first leave first and are read last.  The fastest of these plans, with the time that kernels wait, is compared
with the plan that moves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from compile_remat.passes.memory.buffers import Bools
from compile_remat.passes.memory.step_curve import Movable, StepCurve
from compile_remat.passes.problem.plan import Offloaded, Plan, Status
from compile_remat.passes.search.offload.absent import without_moved
from compile_remat.passes.search.offload.link import Link
from compile_remat.passes.search.offload.transfers import Transfers, transfers_of

if TYPE_CHECKING:
    from compile_remat.passes.search.solver import Planner

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: the fixed cost of a copy outweighs them."""

PARTS = (1, 31 / 32, 15 / 16, 7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 1 / 8)
"""Larger budgets that are tried, as parts of the bytes that the link takes during the forward, in which few last copies end."""

FIRST_OF, FIRST_PARTS = (1.0, 1.5), (1, 15 / 16)
"""Larger budgets, as parts of these bytes, and parts of them that leave first, for plans around buffers that are away."""

BEYOND = (1 / 64, 1 / 8, 1.0)
"""Ends of the intervals of bytes that are moved beyond the window, in the proof of a bound, as parts of the window."""

UNSURE_STEP, UNSURE_GAIN = 0.01, 0.25
"""A plan with copies is taken only if it is faster by more than these parts of the step and of the gain: rates are measured."""


@dataclass(frozen=True)
class _Start:
    """A plan whose saved values may leave.

    Attributes:
        saved: Mask of the saved values, [values].
        lowest_bytes: Peak if each buffer leaves as soon as possible and comes back as late as possible, and kernels wait for it.
    """

    saved: Bools
    curve: StepCurve
    lowest_bytes: int


@dataclass(frozen=True)
class Found:
    """A plan whose copies keep the budget.

    Attributes:
        saved: Mask of the saved values, [values].
        time_ns: Extra time of the plan with its copies.
    """

    saved: Bools
    curve: StepCurve
    made: Transfers
    time_ns: int


class Offload:
    """Plans of one problem that move saved values to the host; results that several budgets share are computed once."""

    def __init__(self, planner: Planner, link: Link) -> None:
        self.planner, self.link = planner, link

    def fastest(self, budget_bytes: int, without: Plan) -> Plan:
        """The fastest plan found within the budget; `without` if that is no slower, or if no plan is found.

        Args:
            without: The plan for the budget that moves nothing; it may be over the budget.
        """
        step_ns = self.planner.problem.step_time_ns
        best = self._best(self._starts_for(budget_bytes, is_low=not without.is_feasible), budget_bytes)
        if best is None:
            return without
        gain_ns = without.extra_time_ns - best.time_ns
        if without.is_feasible and gain_ns <= UNSURE_STEP * step_ns + UNSURE_GAIN * gain_ns:
            return without
        return self.described(best, budget_bytes, budget_bytes)

    def lowest(self, without: Plan) -> Plan:
        """The fastest plan found of nearly the lowest peak; `without` if copies do not lower its peak.

        Args:
            without: The lowest plan that moves nothing.
        """
        same_peak = self.planner.options.same_peak
        lowest_bytes = min(start.lowest_bytes for start in self._low_starts)
        if lowest_bytes >= without.peak_bytes * same_peak:
            return without
        limit_bytes = int(lowest_bytes / same_peak)
        best = self._best(self._starts_for(limit_bytes, is_low=True), limit_bytes)
        return without if best is None else self.described(best, None, best.made.peak_bytes)

    def moved(self, saved: Bools, values: Bools) -> Found:
        """The plan that saves the values in a mask and moves the buffers of those in `values`, at its lowest peak.

        Kernels wait for copies only as far as that peak asks for it; the host has room for all of them.
        """
        curve = self.planner.curve(saved)
        buffers = [each for each in large_enough(curve) if values[each.value]]
        least_bytes = transfers_of(curve, buffers, self.link, 0).peak_bytes
        made = transfers_of(curve, buffers, self.link, least_bytes)
        kept_ns = self.planner.search.time(saved) - self.planner.fastest_time_ns
        return Found(saved, curve, made, kept_ns + made.stall_ns)

    def window_bytes(self, extra_ns: int) -> int:
        """The most bytes that the link takes away during the forward of a plan of at most this extra time, within the host's."""
        values = self.planner.problem.values
        kernels_ns = sum(v.time_ns for v in values if v.in_forward and not v.is_snapshot)
        saving_ns = min(sum(v.save_time_ns for v in values), self.planner.fastest_time_ns + extra_ns)
        return min(self.link.host_bytes, (kernels_ns + saving_ns) * self.link.out_bytes_per_s // 1_000_000_000)

    def _starts_for(self, budget_bytes: int, *, is_low: bool) -> Iterator[_Start]:
        """Starts for one budget; with `is_low`, those of plans below what recomputation reaches, too."""
        window_bytes = self.window_bytes(0)
        yield from self._starts(self._parts(budget_bytes, window_bytes))
        larger = [budget_bytes + int(times * window_bytes) for times in FIRST_OF]
        for start in self._starts(larger):
            for part in FIRST_PARTS:
                saved = self._planned_again(start, int(part * window_bytes), budget_bytes)
                if saved is not None:
                    yield self._start(saved)
        if is_low:
            yield from self._low_starts

    def _planned_again(self, start: _Start, moved_bytes: int, budget_bytes: int) -> Bools | None:
        """Mask of a plan for the budget while the buffers that a start completes first are away; None if none is found."""
        first = first_of(large_enough(start.curve), moved_bytes)
        if not first:
            return None
        away = transfers_of(start.curve, first, self.link, sys.maxsize)
        planner = self.planner.on(without_moved(self.planner.problem, start.curve, away))
        with planner.work.search():
            return planner.saved_within(budget_bytes)

    @cached_property
    def _low_starts(self) -> list[_Start]:
        """Plans from that of the lowest peak to the fastest, whose copies may lower the peak further."""
        lowest_bytes = self.planner.lowest_kept().peak_bytes
        fastest_bytes = self.planner.fastest().peak_bytes
        return list(self._starts([*self._parts(lowest_bytes, fastest_bytes - lowest_bytes), lowest_bytes]))

    def _parts(self, first_bytes: int, span_bytes: int) -> list[int]:
        """Budgets from the largest on: plans for smaller ones are mostly slower, whatever they move."""
        return [first_bytes + int(span_bytes * part) for part in PARTS]

    def _starts(self, larger_bytes: Sequence[int]) -> Iterator[_Start]:
        """Plans for larger budgets, each once."""
        planner, seen = self.planner, set[bytes]()
        fastest_bytes = planner.fastest().peak_bytes
        for each in larger_bytes:
            with planner.work.search():
                saved = planner.saved_within(min(each, fastest_bytes))
            if saved is None or saved.tobytes() in seen:
                continue
            seen.add(saved.tobytes())
            yield self._start(saved)

    def _start(self, saved: Bools) -> _Start:
        curve = self.planner.curve(saved)
        moved = first_of(large_enough(curve), self.link.host_bytes, self.link.held_bytes)
        return _Start(saved, curve, transfers_of(curve, moved, self.link, 0).peak_bytes)

    def _best(self, starts: Iterable[_Start], budget_bytes: int) -> Found | None:
        """The fastest plan within the budget that moves something from one of the starts; None if there is none."""
        best: Found | None = None
        for start in starts:
            kept_ns = self.planner.search.time(start.saved) - self.planner.fastest_time_ns
            if start.lowest_bytes > budget_bytes or (best is not None and kept_ns >= best.time_ns):
                continue
            made = fewest(start.curve, self.link, budget_bytes)
            if made is not None and (best is None or kept_ns + made.stall_ns < best.time_ns):
                best = Found(start.saved, start.curve, made, kept_ns + made.stall_ns)
        return best

    def described(self, found: Found, budget_bytes: int | None, limit_bytes: int) -> Plan:
        """The plan, with its lower bound among the plans whose peak is at most `limit_bytes`."""
        curve, made, planner = found.curve, found.made, self.planner
        window_bytes = self.window_bytes(found.time_ns)
        bound_ns = least_time_ns(planner, limit_bytes, self.link, window_bytes, found.time_ns)
        plan = planner.plan_of(found.saved, None, bound_ns=bound_ns)
        order = sorted(zip(made.moved, made.releases, made.fetches, strict=True), key=lambda each: each[0].first_read)
        offloaded = tuple(
            Offloaded(each.name, _named(curve.places, release), curve.slots[fetch]) for each, release, fetch in order
        )
        return replace(
            plan,
            offloaded=offloaded,
            offloaded_bytes=made.nbytes,
            host_bytes=made.host_bytes(self.link),
            link_bytes=window_bytes,
            stall_time_ns=made.stall_ns,
            budget_bytes=budget_bytes,
            peak_bytes=made.peak_bytes,
            forward_peak_bytes=min(plan.forward_peak_bytes, made.peak_bytes),
            extra_time_ns=found.time_ns,
            least_peak_bytes=min(plan.least_peak_bytes, made.peak_bytes),
            status=Status.OPTIMAL if found.time_ns <= bound_ns else Status.FEASIBLE,
        )


def large_enough(curve: StepCurve) -> list[Movable]:
    """The buffers of a step that may leave."""
    return [each for each in curve.movable if each.nbytes >= LEAST_BYTES]


def first_of(
    buffers: Sequence[Movable], room_bytes: int, taken: Callable[[int], int] = lambda nbytes: nbytes
) -> list[Movable]:
    """The first buffers, as many as there is room for; `taken` is the room that a number of bytes takes."""
    ends = np.cumsum([taken(each.nbytes) for each in buffers])
    return list(buffers[: int(np.searchsorted(ends, room_bytes, side="right"))])


def fewest(curve: StepCurve, link: Link, budget_bytes: int) -> Transfers | None:
    """Copies of few buffers that keep the budget; None if no set is found within the budget and the host's memory."""
    movable = large_enough(curve)

    def made(moved: list[Movable]) -> Transfers:
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
    for each in reversed(best.moved):
        fewer = made([other for other in best.moved if other is not each])
        if fewer.peak_bytes <= budget_bytes and fewer.stall_ns <= best.stall_ns:
            best = fewer
    return best if best.moved and best.host_bytes(link) <= link.host_bytes else None


def _named(places: tuple[str, ...], place: int) -> str:
    """The first node that the forward computes at a place or behind it; empty at its end."""
    return next((name for name in places[place:] if name), "")


def least_time_ns(planner: Planner, budget_bytes: int, link: Link, window_bytes: int, most_ns: int) -> int:
    """Proven least extra time of any plan within the budget, whatever it moves to the host; at most `most_ns`.

    A plan that moves D bytes keeps, if nothing is moved, within the budget and D, so that it recomputes at least as long as any
    plan there.  Beyond the bytes that the link takes away during the forward, kernels wait.  The sum of both is bounded from below
    for all D of an interval: by the recomputation at its end, and by the waiting at its beginning.
    """
    most_bytes = min(link.host_bytes, max(0, planner.fastest().peak_bytes - budget_bytes))
    ends = [window_bytes, *(window_bytes + int(window_bytes * part) for part in BEYOND), most_bytes]
    least_ns, begin = most_ns, 0
    for end in ends:
        waiting_ns = link.out_ns(max(0, begin - window_bytes))
        if begin < most_bytes and waiting_ns < least_ns:
            bound_ns = planner.search.bound(budget_bytes + min(end, most_bytes), most_ns, once=True)
            least_ns = min(least_ns, bound_ns + waiting_ns)
        begin = end
    return least_ns
