"""One budget for all region calls of a step on a device, as a hook of each of its regions.

Regions are compiled one after the other: when the first is planned, neither the later ones are known nor how often one of them
will run in a step.  What is known then: whether Dynamo ends the graph by a graph break (`ends_in_graph_break`), the option
`instances`, which calls are in flight, and whether the last step had several calls.  Where any of these says that there will be
peers, the first step is conservative: the region holds as little as it can, within what the calls in flight leave.

When a step is over, the order of its calls is known.  Each region then has a menu (`PlanOption`) or gets one in the second
step, and the fastest choice of one option for each region within the budget (`joint_allocation.allocate`) is compiled for the next
step.  So the budget holds for the whole step from the first one on where Dynamo says that there are peers.  For callables that
were compiled separately it holds from the second step on: in the first one, the region that runs first has the whole
budget, later ones have what is left, and a warning says so where that is not enough.

The states of a region are those of `runtime.states.PlanState`.
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
from compile_remat.errors import RematError, SharedBudgetError, find_error, warn
from compile_remat.passes import PlanOption
from compile_remat.planning.joint_allocation import Allocation, RegionCall, allocate, step_peak_bytes
from compile_remat.planning.plain_peaks import note_plain_bytes
from compile_remat.planning.request import Fit, Replay, Request, SharedOption
from compile_remat.runtime.region import CallInFlight, CompiledRegion, Hook, RunningPlan
from compile_remat.runtime.states import CallState, PlanEvent, PlanState

LOG = logging.getLogger("compile_remat")

ROUNDS = 4
"""Joint allocations for one kind of step, at most.  After each one the chosen plans are compiled; where their code needs more than
was predicted, the next one counts with that."""

KEPT_SHARE = 0.01
"""The regions of a step keep the plans that they run under unless others save more than this share of the step's time, each its
part of it: compiling one again takes seconds, inside the user's second step."""

CHANGES = 6
"""Plans that joint allocations give to one region, at most: where the steps of a program keep changing, a region would otherwise be
compiled for each of them.  Then it is frozen, and so are the plans of its peers."""

Step = dict[CallInFlight, tuple[WeakIdRef, ...]]
"""Calls in the order of their forwards, each with its parameters."""

_BUDGETS: dict[tuple[str, str], SharedBudget] = {}
"""By device and budget, as the user gave it."""


class SharedBudget(Hook):
    """The regions that share one budget on one device, and the calls of the steps that run.

    Compiling another plan happens inside a forward and under the lock, inside of which Dynamo's is taken; what reads only
    (`calls_in_flight`, `in_flight_bytes`) takes no lock, because Dynamo calls it while it holds its own.  Of threads that train at
    the same time, each has steps of its own, and the budget holds for each step: which calls of two threads overlap differs from
    one step to the next, so no plan can be made for them together.

    Args:
        budget: In bytes, a fraction of what plain torch.compile takes for the step, or `min`.
        source: In words, where a budget that may be missed comes from; empty where missing it is an error.
        device: Name of the device, see `planning.plain_peaks`.

    Attributes:
        reread: What `auto` comes to beside the bytes of gradients that lie there; called once, when the second step begins.
    """

    def __init__(self, budget: MemoryBudget, *, source: str = "", device: str = "cpu") -> None:
        self.budget = budget
        self.source, self.device = source, device
        self.reread: Callable[[int], MemoryBudget] | None = None
        self._calls: Step = {}  # of all threads
        self._allocated: object = None  # the step that plans were last chosen for
        self._has_warned_of_threads = False
        self._lock = threading.RLock()

    @property
    def calls_in_flight(self) -> list[CallInFlight]:
        """The calls of this thread's step whose backward has not ended."""
        return [call for call in self._step_of(self._thread()) if call.is_in_flight]

    @property
    def is_idle(self) -> bool:
        """Whether no call of any thread is in flight."""
        return not any(call.is_in_flight for call in self._calls)

    @property
    def in_flight_bytes(self) -> int:
        """What these calls hold."""
        return sum(call.saved_bytes for call in self.calls_in_flight)

    @property
    def in_flight_plain_bytes(self) -> int:
        """What they would hold under plain torch.compile, as far as it is known."""
        regions = [call.region for call in self.calls_in_flight]
        return sum(region.plain.held_bytes for region in regions if region is not None and region.plain is not None)

    @property
    def is_provisional(self) -> bool:
        """Whether a call in flight runs under a plan that was made without peers."""
        return any(not call.is_shared for call in self.calls_in_flight)

    @property
    def expects_peers(self) -> bool:
        """Whether calls are in flight, or a thread's last step had several, of regions that are still there."""
        steps = map(self._step_of, self._threads())
        return bool(self.calls_in_flight) or any(len(step) > 1 and all(call.region for call in step) for step in steps)

    def option_beside_others(
        self, calls: int = 0, gradient_bytes: int = 0, *, more_follow: bool = False
    ) -> SharedOption:
        """The request of a region that is compiled while the calls in flight hold what they hold; see `SharedOption`."""
        return SharedOption(
            self.in_flight_bytes,
            calls,
            gradient_bytes,
            may_miss=self.is_provisional,
            others_plain_bytes=self.in_flight_plain_bytes,
            more_follow=more_follow,
        )

    def option_at_larger_sizes(self, call: CallInFlight) -> SharedOption:
        """The request of a region whose call has begun and outgrows its plan: beside the other calls in flight."""
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
        """The thread whose step a forward belongs to that begins now.

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
        """End the last step where it is over, and compile the plan that the region's state asks for.

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
        """A step begins, with a forward of `following`: end the thread's last one, and all of them where no call is in flight."""
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
        """`auto` was read again, with the optimizer's state or a first micro-batch's gradients: a plan that does not fit goes."""
        if found.kind != "bytes" or int(found.value or 0) >= int(self.budget.value or 0):
            return
        if len(step) > 1 or following.state is not PlanState.EXCLUSIVE:
            self.budget = found  # the next joint allocation has it
        elif following.running.plan.peak_bytes > int(found.value or 0):
            self.budget = found
            following.move(PlanEvent.BUDGET_FELL)

    def _allocate(self, regions: Sequence[CompiledRegion], step: Step) -> None:
        """Choose a plan for each region and compile them; once more while their code needs more than was predicted.

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
        step_ns = sum(counts[g] * region.running.plan.step_time_ns for g, region in enumerate(regions))
        kept_ns = int(KEPT_SHARE * step_ns / len(regions))
        for known_only in (False, True):
            menus = [_corrected_menu(region, known_only=known_only) for region in regions]
            menus = [_preferring(menu, regions[g], kept_ns // counts[g]) for g, menu in enumerate(menus)]
            found = allocate(calls, menus, limit_bytes)
            if limit_bytes is None or found.peak_bytes <= limit_bytes:
                return found, limit_bytes
        assert limit_bytes is not None
        if not self.source:
            raise SharedBudgetError(limit_bytes, found.peak_bytes, num_runs=len(calls), written=self.budget.written)
        warn(
            f"{self.source} allows {format_bytes(limit_bytes)}, and {len(calls)} runs of compiled graphs need "
            f"{format_bytes(found.peak_bytes)} in a step; these are their lowest plans"
        )
        return found, limit_bytes

    def _limit_bytes(self, regions: Sequence[CompiledRegion], calls: Sequence[RegionCall]) -> int | None:
        """The budget of the step; None where the lowest peak is asked for."""
        if self.budget.kind == "fraction":
            plain = [region.plain or min(region.menu, key=lambda option: option.time_ns) for region in regions]
            return int(float(self.budget.value or 0) * note_plain_bytes(self.device, step_peak_bytes(calls, plain)))
        return int(self.budget.value or 0) if self.budget.kind == "bytes" else None


def budget_of(
    device: torch.device, given: str, budget: MemoryBudget, *, source: str = "", name: str = "cpu"
) -> SharedBudget:
    """The budget that regions on a device share.

    Args:
        given: The setting as the user gave it.
        budget: What it stands for now; it takes effect where no call of any thread is in flight.
        source: As in `SharedBudget`.
        name: The device's name there.
    """
    shared = _BUDGETS.setdefault((str(device), given), SharedBudget(budget, source=source, device=name))
    if shared.is_idle:
        shared.budget = budget
    return shared


def clear_budgets() -> None:
    """Regions that are compiled from now on share nothing with those of before."""
    _BUDGETS.clear()


def _gradient_bytes(step: Step) -> int:
    """Bytes of the gradients that lie there of the step's parameters."""
    return free_memory.gradient_bytes(ref() for ref in {ref for parameters in step.values() for ref in parameters})


def _region_calls(regions: Sequence[CompiledRegion], step: Step) -> list[RegionCall]:
    """The calls of the step.  A parameter's gradient exists once, from the backward that runs first: that of the last call."""
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
    """The menu with what the emitted code needs beyond it; unless `known_only`, the most seen so far where that is not known."""
    guess = 0 if known_only else max(region.excess_bytes.values(), default=0)
    return [replace(o, peak_bytes=o.peak_bytes + region.excess_bytes.get(o.saved, guess)) for o in region.menu]


def _preferring(menu: Sequence[PlanOption], region: CompiledRegion, kept_ns: int) -> list[PlanOption]:
    """The menu with the option that runs taken to be so much faster."""
    running = region.running.plan.saved
    return [replace(o, time_ns=o.time_ns - kept_ns) if o.saved == running else o for o in menu]


def _run_option(region: CompiledRegion, option: PlanOption) -> None:
    """Run under this option from now on; where it does not compile, under the plan of before."""
    if option.saved == region.running.plan.saved:
        return
    found = region.known.get(option.saved) or _compiled(region, Replay(option.saved))
    if found is not None:
        region.run_under(found)


def _compiled(region: CompiledRegion, request: Request) -> RunningPlan | None:
    """Another plan of the region; None where it does not compile, with a warning.

    Raises:
        RematError: No plan is what is requested.
    """
    try:
        return region.recompile(request)
    except Exception as error:  # whatever a compiler raises: the plan that ran goes on running
        ours = find_error(error, RematError)
        if ours is not None:
            raise ours from None
        warn(f"another plan does not compile ({type(error).__name__}: {error}); the one that ran goes on running")
        LOG.warning("a plan does not compile", exc_info=True)
        return None


def _text(count: int, num_graphs: int, found: Allocation, limit_bytes: int | None) -> str:
    times = "once" if count == 1 else f"{count} times"
    others = f" beside {num_graphs - 1} other graph{'s' * (num_graphs > 2)}" if num_graphs > 1 else ""
    limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
    return f"runs {times} in a step{others}; predicted peak of the step {format_bytes(found.peak_bytes)}{limit}"
