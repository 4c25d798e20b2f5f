"""Chooses the saved values that wait on the host, together with the plan that saves them.

A plan for a larger budget recomputes less, and the link takes away the bytes by which it exceeds the budget.  So the first plan is
made for the budget and all bytes that the link can take away during the forward.  Which of them its own copies take away is less:
the first tensor has to be complete before the link starts, and the last copies would end behind the forward.  So the next plan is
made around the buffers that the first one takes away, as if these took no memory while they are away, and so on (`around`).  Of
each plan the fewest buffers are moved that keep the budget.  Moves of single buffers improve the fastest of these plans, with the
time that kernels wait, and the result is compared with the plan that moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from compile_remat.passes.memory.buffers import Bools
from compile_remat.passes.memory.step_curve import StepCurve
from compile_remat.passes.problem.plan import Offloaded, Plan, Status
from compile_remat.passes.search.offload.absent import without_moved
from compile_remat.passes.search.offload.around import Around, Found
from compile_remat.passes.search.offload.bound import MovingBound
from compile_remat.passes.search.offload.copies import first_of, large_enough
from compile_remat.passes.search.offload.link import Link
from compile_remat.passes.search.offload.transfers import Transfers, transfers_of

if TYPE_CHECKING:
    from compile_remat.passes.search.solver import Planner

LOW_STARTS = 8
"""Parts between the lowest plan and the fastest, whose plans are starts for budgets below what recomputation reaches."""

UNSURE_STEP, UNSURE_GAIN = 0.01, 0.25
"""A plan with copies is taken only if it is faster by more than these parts of the step and of the gain: rates are measured."""


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
        best = self._best(budget_bytes, is_low=not without.is_feasible)
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
        lowest_bytes = min(map(self._lowest_bytes, self._low_starts))
        if lowest_bytes >= without.peak_bytes * same_peak:
            return without
        best = self._best(int(lowest_bytes / same_peak), is_low=True)
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

    def _best(self, budget_bytes: int, *, is_low: bool) -> Found | None:
        """The fastest plan found within the budget that moves something; None if none is found.

        Args:
            is_low: True if no plan that moves nothing is within the budget.
        """
        planner = self.planner
        with planner.work.search():
            around = Around(planner, self.link, budget_bytes)
            larger_bytes = min(budget_bytes + self.window_bytes(0), planner.fastest().peak_bytes)
            start = planner.saved_at_once(larger_bytes)
            starts = [] if start is None else [start]
            best = around.best_of([*starts, *self._low_starts] if is_low else starts, self._is_close(budget_bytes))
            if best is None:
                return None
            if not self._is_close(budget_bytes)(best, planner.options.close_gap):
                best = around.improved(best)
            return around.spared(best)

    def _is_close(self, budget_bytes: int) -> Callable[[Found, float], bool]:
        """Returns a function that says of a plan whether its time is close to that of the fastest one, by the cuts' bound."""

        def is_close(found: Found, gap: float) -> bool:
            least_ns = self._bound(budget_bytes, found.time_ns).by_cuts_ns(budget_bytes)
            return found.time_ns - least_ns <= gap * self.planner.problem.step_time_ns

        return is_close

    def _bound(self, budget_bytes: int, extra_ns: int) -> MovingBound:
        most_bytes = min(self.link.host_bytes, max(0, self.planner.fastest().peak_bytes - budget_bytes))
        return MovingBound(self.planner.search, self.link, self.window_bytes(extra_ns), most_bytes)

    @cached_property
    def _low_starts(self) -> list[Bools]:
        """Plans from the fastest to the lowest, and one of low peak around all buffers of the fastest while these are away."""
        planner, fastest = self.planner, self.planner.search.levels[0]
        curve, made = self._all_away(fastest)
        around = planner.on(without_moved(planner.problem, curve, made))
        first_bytes, last_bytes = planner.lowest_kept().peak_bytes, planner.fastest().peak_bytes
        budgets = [first_bytes + (last_bytes - first_bytes) * k // LOW_STARTS for k in range(1, LOW_STARTS)]
        with planner.work.search():
            between = [planner.saved_at_once(budget_bytes) for budget_bytes in budgets]
            starts = [fastest, around.minimum_peak.first, planner.minimum_peak.first, *between]
        return [saved for saved in starts if saved is not None]

    def _lowest_bytes(self, saved: Bools) -> int:
        """The peak of a plan if each buffer leaves as soon as possible and comes back as late as possible."""
        return self._all_away(saved)[1].peak_bytes

    def _all_away(self, saved: Bools) -> tuple[StepCurve, Transfers]:
        curve = self.planner.curve(saved)
        moved = first_of(large_enough(curve), self.link)
        return curve, transfers_of(curve, moved, self.link, 0)

    def described(self, found: Found, budget_bytes: int | None, limit_bytes: int) -> Plan:
        """The plan, with its lower bound among the plans whose peak is at most `limit_bytes`."""
        curve, made, planner = found.curve, found.made, self.planner
        window_bytes = self.window_bytes(found.time_ns)
        bound_ns = self._bound(limit_bytes, found.time_ns).least_time_ns(limit_bytes, found.time_ns)
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


def _named(places: tuple[str, ...], place: int) -> str:
    """The first node that the forward computes at a place or behind it; empty at its end."""
    return next((name for name in places[place:] if name), "")
