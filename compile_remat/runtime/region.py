"""What `torch.compile` gets from the backend: one region, its running plan, and the hooks around its calls.

`CompiledRegion` is the only wrapper around compiled code.  It finds the autograd node of a call once and intercepts the backward
once; what is to happen around them stands in hooks (`PeakMonitor`, `SharedBudget`, `OomRecovery`), which do not know each other.
The states of a region's plan and of its calls, with every transition, are the tables of `runtime.states`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from compile_remat._torch.autograd_node import (
    Backward,
    can_be_differentiated,
    compiled_node,
    intercept_backward,
    keeps_its_graph,
    sequence_number,
)
from compile_remat._torch.tensor_arguments import has_fake
from compile_remat._util.size_range import Sizes
from compile_remat.passes import Plan, PlanOption
from compile_remat.planning.request import Request
from compile_remat.report import Report
from compile_remat.runtime.states import (
    CALL_TRANSITIONS,
    PLAN_TRANSITIONS,
    CallEvent,
    CallState,
    PlanEvent,
    PlanState,
)

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class RunningPlan:
    """Compiled code, and the report of the plan in it, which has one."""

    compiled: Compiled
    report: Report

    @property
    def plan(self) -> Plan:
        """The plan of the report."""
        assert self.report.plan is not None
        return self.report.plan

    @property
    def excess_bytes(self) -> int | None:
        """By how much the codegen peak exceeds the planned one; None where it is not known."""
        codegen_bytes = self.report.scheduled_peak_bytes
        return None if codegen_bytes is None else max(0, codegen_bytes - self.plan.peak_bytes)


class CallInFlight:
    """One forward of a region and its backward; a `CallState` says how far it is.

    Attributes:
        state: See `runtime.states`.
        thread: The thread of the forward, or of the step that a forward inside a backward belongs to.
        running: The code that this call runs; other threads may run other plans of the region at the same moment.
        saved_bytes: What the plan of this call keeps from the forward for the backward, outputs included.
        notes: What each hook remembers of the call while it is in flight.
        num_delivered: How many gradients have left its backwards before these ended.
    """

    def __init__(self, region: CompiledRegion) -> None:
        self._region = weakref.ref(region)
        self.state = CallState.FORWARD
        self.thread = threading.get_ident()
        self.running = region.running
        self.saved_bytes = self.running.plan.held_bytes
        self.is_shared = bool(region.menu)
        self.notes: dict[Hook, Any] = {}
        self.num_delivered = 0

    @property
    def region(self) -> CompiledRegion | None:
        """The region; None where it is gone, as with its model."""
        return self._region()

    @property
    def is_in_flight(self) -> bool:
        """Whether the call holds what its backward reads."""
        return self.state in (CallState.FORWARD, CallState.AWAITING_BACKWARD)

    def move(self, event: CallEvent) -> None:
        """Go to the next state; KeyError where the table has no such transition."""
        self.state = CALL_TRANSITIONS[self.state, event]
        if not self.is_in_flight:
            self.notes.clear()


class Hook:
    """What happens around the calls of a region; each method does nothing by default."""

    def called(self, region: CompiledRegion) -> None:
        """The region is called, with or without gradients."""

    def before_forward(self, call: CallInFlight, args: Sequence[Any]) -> None:
        """A forward that may have a backward begins; here the region and its call may get another plan."""

    def forward(self, call: CallInFlight, run: Compiled, *args: Any) -> Any:
        """The outputs: those of ``run(*args)``."""
        return run(*args)

    def after_forward(self, call: CallInFlight, args: Sequence[Any], node: Any) -> None:
        """The forward has returned, and `node` is its node in autograd."""

    def backward(self, call: CallInFlight, run: Backward, *arguments: Any) -> Any:
        """The gradients: those of ``run(*arguments)``."""
        return run(*arguments)

    def after_backward(self, call: CallInFlight) -> None:
        """A backward has ended; autograd may call another one if it keeps the graph."""


class Publish(Protocol):
    """Records the report of a plan that runs from now on, in place of all others of the graph or (`replaces` False) beside them."""

    def __call__(self, report: Report, *, replaces: bool = True) -> None: ...


def _publish_nothing(report: Report, *, replaces: bool = True) -> None:
    pass


class CompiledRegion:
    """One graph of Dynamo's as compiled code that may be replaced between its calls.

    Attributes:
        running: The code that the next call runs.
        state: How its plan was made; see `runtime.states`.
        menu: Plan options for a joint allocation; empty for a plan that was made without peers.
        plain: What plain torch.compile takes for it, where that is known.
        excess_bytes: What the emitted code needs beyond a plan, by what the plan saves.
        num_changes: Changes of the plan by joint allocations.

    Args:
        running: The first plan.
        hooks: What happens around each call, the outermost first.
        recompile: Compiles another plan, made for these sizes, and records nothing; None where there is none.
        publish: Records a report; see `Publish`.
    """

    def __init__(
        self,
        running: RunningPlan,
        hooks: Sequence[Hook],
        recompile: Callable[[Request, Sizes], RunningPlan | None] = lambda request, sizes: None,
        publish: Publish = _publish_nothing,
    ) -> None:
        self.hooks, self.publish = tuple(hooks), publish
        self._recompile = recompile
        self.menu: tuple[PlanOption, ...] = ()
        self.plain: PlanOption | None = None
        self.excess_bytes: dict[tuple[str, ...], int] = {}
        self.known: dict[tuple[str, ...], RunningPlan] = {}
        self.num_changes = 0
        self.run_under(running)
        self.state = PlanState.EXPECTING if self.menu else PlanState.EXCLUSIVE

    def recompile(self, request: Request, sizes: Sizes | None = None) -> RunningPlan | None:
        """Compile another plan, for the sizes of the running one where no others are given; None where there is none."""
        planned = self.running.report.size_range
        if sizes is None:
            sizes = () if planned is None else planned.planned_sizes
        return self._recompile(request, sizes)

    def move(self, event: PlanEvent) -> None:
        """Go to the next state; KeyError where the table has no such transition."""
        self.state = PLAN_TRANSITIONS[self.state, event]

    def run_under(self, running: RunningPlan) -> None:
        """Take up a plan, and with it what its report knows beside it."""
        self.running = self.known[running.plan.saved] = running
        self.menu = running.report.offers or self.menu
        self.plain = running.report.plain or self.plain
        if running.excess_bytes is not None:
            self.excess_bytes[running.plan.saved] = running.excess_bytes

    def forget_plans(self) -> None:
        """Drop what is known of plans for smaller sizes: their peaks are no longer those of the calls."""
        self.known.clear()
        self.excess_bytes.clear()

    def __call__(self, *args: Any) -> Any:
        """Run the graph.  On tensors without contents, as where torch cuts a graph at the buckets of DDP, no step happens."""
        if has_fake(args):
            return self.running.compiled(*args)
        for hook in self.hooks:
            hook.called(self)
        if not can_be_differentiated(args):
            return self.running.compiled(*args)
        call = CallInFlight(self)
        try:
            for hook in self.hooks:
                hook.before_forward(call, args)
            since = sequence_number()
            outputs = self._forward(call, args)
            node = compiled_node(outputs, since)
            if node is not None:
                call.saved_bytes, call.is_shared = call.running.plan.held_bytes, bool(self.menu)
                call.move(CallEvent.RETURNED)
                intercept_backward(node, _Pending(self, call))
        finally:
            if call.state is CallState.FORWARD:
                call.move(CallEvent.NO_BACKWARD)
        if node is not None:
            for hook in self.hooks:
                hook.after_forward(call, args, node)
        return outputs

    def _forward(self, call: CallInFlight, args: Sequence[Any]) -> Any:
        def run(*given: Any) -> Any:
            return call.running.compiled(*given)

        for hook in reversed(self.hooks):
            run = functools.partial(hook.forward, call, run)
        return run(*args)

    def backward(self, call: CallInFlight, run: Backward, arguments: tuple[Any, ...]) -> Any:
        """Autograd runs the backward of a call."""
        for hook in reversed(self.hooks):
            run = functools.partial(hook.backward, call, run)
        gradients = run(*arguments)
        for hook in self.hooks:
            hook.after_backward(call)
        if call.state is CallState.AWAITING_BACKWARD:
            call.move(CallEvent.RETAINED if keeps_its_graph() else CallEvent.RELEASED)
        return gradients


class _Pending:
    """Is held by the autograd node of a call: keeps the region alive for the backward, and ends the call with the node."""

    def __init__(self, region: CompiledRegion, call: CallInFlight) -> None:
        self.region, self.call = region, call

    def __call__(self, node: Any, original: Backward, arguments: tuple[Any, ...]) -> Any:
        return self.region.backward(self.call, functools.partial(original, node), arguments)

    def __del__(self) -> None:
        if self.call.state is CallState.AWAITING_BACKWARD:
            self.call.move(CallEvent.DROPPED)
