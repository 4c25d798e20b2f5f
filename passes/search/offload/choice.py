"""Chooses the saved values that wait on the host, together with the plan that saves them.

A plan for a larger budget recomputes less, and the link takes away the bytes by which it exceeds the budget.  So plans are made for
budgets up to the bytes that the link can take away during the forward, and from each of them the fewest buffers are moved that keep
the budget: those that the forward completes first leave first and are read last.  The fastest of these plans, with the time that
kernels wait, is compared with the plan that moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compile_remat.passes.memory.buffers import Bools
from compile_remat.passes.memory.step_curve import Movable, StepCurve
from compile_remat.passes.problem.plan import Offloaded, Plan, Status
from compile_remat.passes.search.offload.link import Link
from compile_remat.passes.search.offload.transfers import Transfers, transfers_of

if TYPE_CHECKING:
    from compile_remat.passes.search.solver import Planner

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: the fixed cost of a copy outweighs them."""

PARTS = 8
"""Number of larger budgets that are tried, evenly up to the bytes that the link takes away during the forward."""

BEYOND = (1 / 64, 1 / 8, 1.0)
"""Ends of the intervals of bytes that are moved beyond the window, in the proof of a bound, as parts of the window."""

UNSURE_STEP, UNSURE_GAIN = 0.01, 0.25
"""A plan with copies is taken only if it is faster by more than these parts of the step and of the gain: rates are measured."""


@dataclass(frozen=True)
class _Found:
    """A plan whose copies keep the budget.

    Attributes:
        saved: Mask of the saved values, [values].
        time_ns: Extra time of the plan with its copies.
    """

    saved: Bools
    curve: StepCurve
    made: Transfers
    time_ns: int


def with_offload(planner: Planner, budget_bytes: int, link: Link, without: Plan) -> Plan:
    """The fastest plan found within the budget that moves saved values to the host; `without` if that is no slower.

    Args:
        without: The plan for the budget that moves nothing; it may be over the budget.
    """
    forward_ns = int(planner.curve(planner.mask_of(without.saved)).forward_starts_ns[-1])
    window_bytes = min(link.host_bytes, forward_ns * link.out_bytes_per_s // 1_000_000_000)
    found = _found(planner, budget_bytes, link, window_bytes)
    best = min(found, key=lambda each: each.time_ns, default=None)
    if best is None:
        return without
    gain_ns = without.extra_time_ns - best.time_ns
    if without.is_feasible and gain_ns <= UNSURE_STEP * planner.problem.step_time_ns + UNSURE_GAIN * gain_ns:
        return without
    bound_ns = least_time_ns(planner, budget_bytes, link, window_bytes, best.time_ns)
    return _described(planner.plan_of(best.saved, None, bound_ns=bound_ns), best, budget_bytes)


def _found(planner: Planner, budget_bytes: int, link: Link, window_bytes: int) -> Iterator[_Found]:
    """Plans within the budget that move something, one for each larger budget."""
    seen = set[bytes]()
    fastest_bytes = planner.fastest().peak_bytes
    for part in range(1, PARTS + 1):
        larger_bytes = min(budget_bytes + window_bytes * part // PARTS, fastest_bytes)
        with planner.work.search():
            saved = planner.saved_within(larger_bytes)
        if saved is None or saved.tobytes() in seen:
            continue
        seen.add(saved.tobytes())
        curve = planner.curve(saved)
        made = fewest(curve, link, budget_bytes)
        if made is not None:
            yield _Found(saved, curve, made, planner.search.time(saved) - planner.fastest_time_ns + made.stall_ns)


def fewest(curve: StepCurve, link: Link, budget_bytes: int) -> Transfers | None:
    """Copies of few buffers that keep the budget; None if no set is found within the budget and the host's memory."""
    movable = [each for each in curve.movable if each.nbytes >= LEAST_BYTES]

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
    return best if best.moved and best.nbytes <= link.host_bytes else None


def _described(plan: Plan, found: _Found, budget_bytes: int) -> Plan:
    curve, made = found.curve, found.made
    order = sorted(zip(made.moved, made.releases, made.fetches, strict=True), key=lambda each: each[0].first_read)
    offloaded = tuple(
        Offloaded(each.name, _named(curve.places, release), curve.slots[fetch]) for each, release, fetch in order
    )
    return replace(
        plan,
        offloaded=offloaded,
        offloaded_bytes=made.nbytes,
        stall_time_ns=made.stall_ns,
        budget_bytes=budget_bytes,
        peak_bytes=made.peak_bytes,
        forward_peak_bytes=min(plan.forward_peak_bytes, made.peak_bytes),
        extra_time_ns=found.time_ns,
        status=Status.OPTIMAL if found.time_ns <= plan.bound_time_ns else Status.FEASIBLE,
    )


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
