"""One budget for all region calls of a step on a device, as a hook of each of its regions.

Regions are compiled one after the other: when the first is planned, later regions and their numbers of calls in a step are
unknown.  Four facts are known then: if Dynamo ends the graph by a graph break (`ends_in_graph_break`), the option `instances`, the
calls in flight, and if the last step had several calls.  If any of them indicates peers, the first step is conservative: the region
holds as few bytes as it can, within those that the calls in flight leave.

When a step is over, the order of its calls is known.  Each region then has a menu (`PlanOption`) or gets one in the second
step, and the fastest choice of one option for each region within the budget (`joint_allocation.allocate`) is compiled for the next
step.  So the budget holds for the whole step from the first one on if Dynamo says that there are peers.  For callables that
were compiled separately the budget holds from the second step on: in the first step, the region that runs first has the whole
budget, later regions have the rest of it, and a warning says so if the rest is not enough.

`runtime.states.PlanState` lists the states of a region.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdRef

from compile_remat._torch.autograd_node import runs_in_backward
from compile_remat._util.units import format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.device import free_memory
from compile_remat.errors import RematError, find_error, warn
from compile_remat.passes import PlanOption
from compile_remat.planning.joint_allocation import Allocation, RegionCall, allocate, step_peak_bytes
from compile_remat.planning.plain_peaks import note_plain_bytes
from compile_remat.planning.request import Fit, Replay, Request, SharedOption
from compile_remat.planning.shared_policy import excess_text
from compile_remat.runtime.region import CallInFlight, CompiledRegion, Hook, RunningPlan
from compile_remat.runtime.states import CallState, PlanEvent, PlanState

LOG = logging.getLogger("compile_remat")

ROUNDS = 4
"""Joint allocations for one kind of step, at most.  After each allocation the chosen plans are compiled; if their code needs more
bytes than predicted, the next allocation takes the excess into account."""

KEPT_SHARE = 0.01
"""A region keeps its running plan unless another one saves more than the region's part of this share of the step's time (the
share is divided evenly by regions): to compile a region again takes seconds, inside the user's second step."""

CHANGES = 6
"""Plans that joint allocations give to one region, at most; then the region is frozen, and so are the plans of its peers.  Without
this limit, a program whose steps keep changing would compile the region for each step."""

Step = dict[CallInFlight, tuple[WeakIdRef, ...]]
"""Calls in the order of their forwards, each with weak references to its parameters."""

_BUDGETS: dict[tuple[str, str], SharedBudget] = {}
"""Shared budgets by device and by the setting as the user gave it."""


class SharedBudget(Hook):
    """The hook of all regions that share one budget on one device, with the calls of the running steps.

    Another plan is compiled inside a forward and under this object's lock, inside of which Dynamo's lock is taken.  Read-only
    properties (`calls_in_flight`, `in_flight_bytes`) take no lock, because Dynamo calls them while it holds its own.  Threads that
    train at the same time have separate steps, and the budget holds for each step: the calls of two threads overlap differently in
    each step, so no plan can be made for them together.

    Args:
        budget: Bytes, a fraction of plain torch.compile's peak of the step, or `min`.
        source: Origin of a budget that may be exceeded, in words; empty if exceeding the budget is an error.
        device: Name of the device, see `planning.plain_peaks`.

    Attributes:
        reread: Returns the budget of `auto` while the given bytes of gradients are allocated; called once, when the second step
            begins.
    """

    def __init__(self, budget: MemoryBudget, *, source: str = "", device: str = "cpu") -> None:
        self.budget = budget
        self.source, self.device = source, device
        self.reread: Callable[[int], MemoryBudget] | None = None
        self._calls: Step = {}  # calls of all threads
        self._allocated: object = None  # the step for which plans were last chosen
        self._has_warned_of_threads = False
        self._lock = threading.RLock()

    @property
    def calls_in_flight(self) -> list[CallInFlight]:
        """The calls of this thread's step whose backward has not ended."""
        return [call for call in self._step_of(self._thread()) if call.is_in_flight]

    @property
    def is_idle(self) -> bool:
        """True if no call of any thread is in flight."""
        return not any(call.is_in_flight for call in self._calls)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that the calls in flight of this thread's step hold for their backwards."""
        return sum(call.saved_bytes for call in self.calls_in_flight)

    @property
    def in_flight_plain_bytes(self) -> int:
        """Bytes that the calls in flight of this thread's step would hold under plain torch.compile, as far as known."""
        regions = [call.region for call in self.calls_in_flight]
        return sum(region.plain.held_bytes for region in regions if region is not None and region.plain is not None)

    @property
    def is_provisional(self) -> bool:
        """True if a call in flight runs under a plan that was made without peers."""
        return any(not call.is_shared for call in self.calls_in_flight)

    @property
    def expects_peers(self) -> bool:
        """True if calls are in flight, or if a thread's last step had several calls whose regions all still exist."""
        steps = map(self._step_of, self._threads())
        return bool(self.calls_in_flight) or any(len(step) > 1 and all(call.region for call in step) for step in steps)

    def option_beside_others(
        self, calls: int = 0, gradient_bytes: int = 0, *, more_follow: bool = False
    ) -> SharedOption:
        """Returns the request of a region that is compiled beside the calls in flight; see `SharedOption`."""
        return SharedOption(
            self.in_flight_bytes,
            calls,
            gradient_bytes,
            may_miss=self.is_provisional,
            others_plain_bytes=self.in_flight_plain_bytes,
            more_follow=more_follow,
        )

    def option_at_larger_sizes(self, call: CallInFlight) -> SharedOption:
        """Returns the request of a region whose call has begun with sizes beyond its plan, beside the other calls in flight."""
        assert call.region is not None
        own_bytes = 0 if call.region.plain is None else call.region.plain.held_bytes
        found = self.option_beside_others()
        return replace(
            found,
            others_bytes=found.others_bytes - call.saved_bytes,
            others_plain_bytes=found.others_plain_bytes - own_bytes,
        )

    # -- threads ------------------------------------------------------------------------------------------------------

    def _thread(self) -> int:
        """Returns the thread whose step the forward that begins now belongs to.

        On a device with a thread of its own for backwards, a forward inside a backward (`torch.utils.checkpoint`) belongs to the
        step of the call in flight that began last.
        """
        thread = threading.get_ident()
        if runs_in_backward() and not any(call.thread == thread for call in self._calls):
            return next((call.thread for call in reversed(self._calls) if call.is_in_flight), thread)
        return thread

    def _threads(self) -> list[int]:
        return list(dict.fromkeys(call.thread for call in self._calls))

    def _step_of(self, thread: int) -> Step:
        return {call: leaves for call, leaves in self._calls.items() if call.thread == thread}

    # -- one call -----------------------------------------------------------------------------------------------------

    def before_forward(self, call: CallInFlight, args: Sequence[Any]) -> None:
        """End the last step if it is over, and compile the plan that the region's state asks for.

        Raises:
            SharedBudgetError: The regions of the step cannot stay inside the budget.
        """
        region = call.region
        assert region is not None
        with self._lock:
            call.thread = self._thread()
            if self.calls_in_flight:
                self._beside_others(region)
            else:
                self._end_steps(region)
            if region.state is PlanState.REPLAN_EXCLUSIVE:
                self._replan(region, Fit())
            elif region.state is PlanState.REPLAN_SHARED:
                self._replan(region, self.option_beside_others())
            call.running = region.running
            leaves = (a for a in args if isinstance(a, torch.Tensor) and a.requires_grad and a.is_leaf)
            self._calls = {**self._calls, call: tuple(WeakIdRef(a) for a in leaves)}

    def _beside_others(self, region: CompiledRegion) -> None:
        if region.state is PlanState.REPLAN_EXCLUSIVE:
            region.move(PlanEvent.PEERS_IN_FLIGHT)
        elif region.state is PlanState.EXCLUSIVE and self.budget.kind == "bytes":
            if self.in_flight_bytes + region.running.plan.peak_bytes > int(self.budget.value or 0):
                region.move(PlanEvent.NO_ROOM)

    def _replan(self, region: CompiledRegion, request: Request) -> None:
        found = _compiled(region, request)
        region.move(PlanEvent.FAILED if found is None else PlanEvent.REPLANNED)
        if found is not None:
            region.menu = ()
            region.run_under(found)
            region.publish(found.report)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _end_steps(self, following: CompiledRegion) -> None:
        """End this thread's last step, or those of all threads if no call is in flight; `following` begins a new step."""
        ended = self._threads()
        if not self.is_idle:
            ended = [self._thread()]
            if not self._has_warned_of_threads:
                self._has_warned_of_threads = True
                warn("several threads train under one memory_budget: it holds for the step of each, not for their sum")
        for thread in ended:
            self._end_step(self._step_of(thread), following)
        self._calls = {call: leaves for call, leaves in self._calls.items() if call.thread not in ended}

    def _end_step(self, step: Step, following: CompiledRegion) -> None:
        if all(call.state is not CallState.DONE for call in step):
            return  # nothing was trained
        reread, self.reread = self.reread, None
        if reread is not None:
            self._lower_budget(reread(_gradient_bytes(step)), step, following)
        regions = list(dict.fromkeys(call.region for call in step))
        present = [region for region in regions if region is not None]
        if len(present) < len(regions) or any(region.state is PlanState.FROZEN for region in present):
            return
        for region in present:
            if len(step) > 1 and region.state in (PlanState.EXCLUSIVE, PlanState.EXPECTING):
                region.move(PlanEvent.PEERS_SEEN)
            elif len(step) == 1 and region.state is PlanState.EXPECTING:
                region.move(PlanEvent.NO_PEER_SEEN)
        if len(step) > 1 and all(region.menu for region in present):
            self._allocate(present, step)

    def _lower_budget(self, found: MemoryBudget, step: Step, following: CompiledRegion) -> None:
        """Take up the budget of `auto` as read at the second step, if it is lower; a plan that exceeds it is to be replaced.

        The second reading includes the optimizer's state or the gradients of a first micro-batch.
        """
        if found.kind != "bytes" or int(found.value or 0) >= int(self.budget.value or 0):
            return
        if len(step) > 1 or following.state is not PlanState.EXCLUSIVE:
            self.budget = found  # the next joint allocation uses it
        elif following.running.plan.peak_bytes > int(found.value or 0):
            self.budget = found
            following.move(PlanEvent.BUDGET_FELL)

    def _allocate(self, regions: Sequence[CompiledRegion], step: Step) -> None:
        """Choose a plan for each region and compile these plans; repeat while compiled code shows new excess bytes.

        Raises:
            SharedBudgetError: The regions of the step cannot stay inside the budget.
        """
        calls = _region_calls(regions, step)
        key = [weakref.ref(region) for region in regions], [region.menu for region in regions], calls, self.budget
        if key == self._allocated:
            return
        self._allocated = key
        before = [region.running for region in regions]
        are_new = [region.state is not PlanState.SHARED for region in regions]
        for _ in range(ROUNDS):
            found, limit_bytes = self._choose(regions, calls)
            num_known = sum(len(region.excess_bytes) for region in regions)
            for region, option in zip(regions, found.chosen, strict=True):
                _run_option(region, region.menu[option])
            if sum(len(region.excess_bytes) for region in regions) == num_known:
                break
        for g, region in enumerate(regions):
            region.move(PlanEvent.ALLOCATED)
            is_changed = region.running is not before[g]
            if not (is_changed or are_new[g]):
                continue
            count = sum(call.graph == g for call in calls)
            text = _text(count, len(regions), found, limit_bytes)
            report = region.running.report
            message = "; ".join(filter(None, (report.message, text)))
            peak_bytes = found.peak_bytes
            region.publish(replace(report, message=message, step_peak_bytes=peak_bytes, step_budget_bytes=limit_bytes))
            region.num_changes += is_changed
            if region.num_changes >= CHANGES:
                region.move(PlanEvent.CHANGED_OFTEN)

    def _choose(self, regions: Sequence[CompiledRegion], calls: Sequence[RegionCall]) -> tuple[Allocation, int | None]:
        limit_bytes = self._limit_bytes(regions, calls)
        counts = Counter(call.graph for call in calls)
        step_ns = sum(counts[g] * region.running.plan.once_time_ns for g, region in enumerate(regions))
        kept_ns = int(KEPT_SHARE * step_ns / len(regions))
        for known_only in (False, True):
            menus = [_corrected_menu(region, known_only=known_only) for region in regions]
            menus = [_preferring(menu, regions[g], kept_ns // counts[g]) for g, menu in enumerate(menus)]
            found = allocate(calls, menus, limit_bytes)
            if limit_bytes is None or found.peak_bytes <= limit_bytes:
                return found, limit_bytes
        warn(excess_text(found, limit_bytes, num_runs=len(calls), source=self.source, budget=self.budget))
        return found, limit_bytes

    def _limit_bytes(self, regions: Sequence[CompiledRegion], calls: Sequence[RegionCall]) -> int | None:
        """Returns the budget of the step in bytes; None if the lowest peak is requested."""
        if self.budget.kind == "fraction":
            plain = [region.plain or min(region.menu, key=lambda option: option.time_ns) for region in regions]
            return int(float(self.budget.value or 0) * note_plain_bytes(self.device, step_peak_bytes(calls, plain)))
        return int(self.budget.value or 0) if self.budget.kind == "bytes" else None


def budget_of(
    device: torch.device, given: str, budget: MemoryBudget, *, source: str = "", name: str = "cpu"
) -> SharedBudget:
    """Returns the budget that regions on a device share.

    Args:
        given: The setting as the user gave it.
        budget: The budget that the setting stands for now; takes effect if no call of any thread is in flight.
        source: As in `SharedBudget`.
        name: The device's name, as in `SharedBudget`.
    """
    shared = _BUDGETS.setdefault((str(device), given), SharedBudget(budget, source=source, device=name))
    if shared.is_idle:
        shared.budget = budget
    return shared


def clear_budgets() -> None:
    """Forget all shared budgets: regions compiled from now on share no budget with earlier regions."""
    _BUDGETS.clear()


def _gradient_bytes(step: Step) -> int:
    """Returns the bytes of the gradients that the step's parameters have now."""
    return free_memory.gradient_bytes(ref() for ref in {ref for parameters in step.values() for ref in parameters})


def _region_calls(regions: Sequence[CompiledRegion], step: Step) -> list[RegionCall]:
    """Returns the calls of the step; a parameter's gradient counts once, for its last call, whose backward runs first."""
    counted = set[WeakIdRef]()
    calls = []
    for call, parameters in reversed(step.items()):
        assert call.region is not None
        new = set(parameters) - counted
        counted |= new
        gradient_bytes = sum(leaf.nbytes for ref in new if (leaf := ref()) is not None)
        calls.append(RegionCall(regions.index(call.region), gradient_bytes))
    return calls[::-1]


def _corrected_menu(region: CompiledRegion, *, known_only: bool) -> list[PlanOption]:
    """Returns the menu with excess bytes of the emitted code added; without `known_only`, the largest excess if it is unknown."""
    guess = 0 if known_only else max(region.excess_bytes.values(), default=0)
    return [replace(o, peak_bytes=o.peak_bytes + region.excess_bytes.get(o.saved, guess)) for o in region.menu]


def _preferring(menu: Sequence[PlanOption], region: CompiledRegion, kept_ns: int) -> list[PlanOption]:
    """Returns the menu with the time of the running option lowered by `kept_ns`."""
    running = region.running.plan.saved
    return [replace(o, time_ns=o.time_ns - kept_ns) if o.saved == running else o for o in menu]


def _run_option(region: CompiledRegion, option: PlanOption) -> None:
    """Run the region under this option from now on; keep the plan of before if the option does not compile."""
    if option.saved == region.running.plan.saved:
        return
    found = region.known.get(option.saved) or _compiled(region, Replay(option.saved))
    if found is not None:
        region.run_under(found)


def _compiled(region: CompiledRegion, request: Request) -> RunningPlan | None:
    """Returns another plan of the region; warns and returns None if it does not compile.

    Raises:
        RematError: No plan satisfies the request.
    """
    try:
        return region.recompile(request)
    except Exception as error:  # any error of a compiler: the region keeps its plan
        ours = find_error(error, RematError)
        if ours is not None:
            raise ours from None
        warn(
            f"a new plan for the shared budget does not compile ({type(error).__name__}: {error}); the plan that ran before stays"
        )
        LOG.warning("a plan does not compile", exc_info=True)
        return None


def _text(count: int, num_graphs: int, found: Allocation, limit_bytes: int | None) -> str:
    times = "once" if count == 1 else f"{count} times"
    others = f" beside {num_graphs - 1} other graph{'s' * (num_graphs > 2)}" if num_graphs > 1 else ""
    limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
    return f"runs {times} in a step{others}; predicted peak of the step {format_bytes(found.peak_bytes)}{limit}"
