"""The callable that `torch.compile` gets from the backend: one region, its running plan, and the hooks around its calls.

`CompiledRegion` is the only wrapper around compiled code.  It finds the autograd node of a call once and intercepts the backward
once; hooks (`PeakMonitor`, `SharedBudget`, `OomRecovery`), independent of each other, act around the calls.  The tables of
`runtime.states` list the states of a region's plan and of its calls, with every transition.
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
    """Compiled code with the report of its plan; the report's `plan` is never None."""

    compiled: Compiled
    report: Report

    @property
    def plan(self) -> Plan:
        """The plan of the report."""
        assert self.report.plan is not None
        return self.report.plan

    @property
    def excess_bytes(self) -> int | None:
        """Bytes by which the codegen peak exceeds the planned peak, at least 0; None if the codegen peak is unknown."""
        codegen_bytes = self.report.scheduled_peak_bytes
        return None if codegen_bytes is None else max(0, codegen_bytes - self.plan.peak_bytes)


class CallInFlight:
    """One forward of a region and its backward, with its progress as a `CallState`.

    Attributes:
        state: See `runtime.states`.
        thread: The thread of the forward; for a forward inside a backward, the thread of the step that it belongs to.
        running: The code that this call runs; other threads may run other plans of the region at the same moment.
        saved_bytes: Bytes that the plan of this call keeps from the forward for the backward, outputs included.
        is_shared: True if the region has a menu for a joint allocation.
        notes: Each hook's data about the call while it is in flight.
        num_delivered: Number of gradients that have left its backwards before these ended.
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
        """The region; None if it has been freed, for example with its model."""
        return self._region()

    @property
    def is_in_flight(self) -> bool:
        """True while the call holds the saved tensors of its backward."""
        return self.state in (CallState.FORWARD, CallState.AWAITING_BACKWARD)

    def move(self, event: CallEvent) -> None:
        """Go to the next state; raises KeyError if the table has no such transition."""
        self.state = CALL_TRANSITIONS[self.state, event]
        if not self.is_in_flight:
            self.notes.clear()


class Hook:
    """Methods that run around the calls of a region; by default each does nothing but call `run` where it has one."""

    def called(self, region: CompiledRegion) -> None:
        """Runs at each call of the region, with or without gradients."""

    def before_forward(self, call: CallInFlight, args: Sequence[Any]) -> None:
        """Runs before a forward that may have a backward; the hook may give the region and its call another plan."""

    def forward(self, call: CallInFlight, run: Compiled, *args: Any) -> Any:
        """Runs the forward; returns the outputs of ``run(*args)``."""
        return run(*args)

    def after_forward(self, call: CallInFlight, args: Sequence[Any], node: Any) -> None:
        """Runs after the forward has returned; `node` is its autograd node."""

    def backward(self, call: CallInFlight, run: Backward, *arguments: Any) -> Any:
        """Runs the backward; returns the gradients of ``run(*arguments)``."""
        return run(*arguments)

    def after_backward(self, call: CallInFlight) -> None:
        """Runs after a backward has ended; autograd may run another one if it keeps the graph."""


class Publish(Protocol):
    """Records the report of a plan that runs from now on, in place of the graph's other reports or (no `replaces`) beside them."""

    def __call__(self, report: Report, *, replaces: bool = True) -> None: ...


def _publish_nothing(report: Report, *, replaces: bool = True) -> None:
    pass


class CompiledRegion:
    """One graph of Dynamo's as compiled code that may be replaced between its calls.

    Attributes:
        running: The code that the next call runs.
        state: State of the plan; see `runtime.states`.
        menu: Plan options for a joint allocation; empty for a plan that was made without peers.
        plain: Plain torch.compile's plan option for the region; None if unknown.
        excess_bytes: Bytes by which the emitted code exceeds a plan's peak, by the names of the plan's saved values.
        known: Plans that were compiled, by the names of their saved values.
        num_changes: Changes of the plan by joint allocations.

    Args:
        running: The first plan.
        hooks: The hooks of each call, the outermost first.
        recompile: Compiles another plan, made for these sizes, and records nothing; returns None if there is none.
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
        """Compile another plan, by default for the sizes of the running one; returns None if there is none."""
        planned = self.running.report.size_range
        if sizes is None:
            sizes = () if planned is None else planned.planned_sizes
        return self._recompile(request, sizes)

    def move(self, event: PlanEvent) -> None:
        """Go to the next state; raises KeyError if the table has no such transition."""
        self.state = PLAN_TRANSITIONS[self.state, event]

    def run_under(self, running: RunningPlan) -> None:
        """Run a plan from now on; take the menu, the plain option and the excess bytes from its report."""
        self.running = self.known[running.plan.saved] = running
        self.menu = running.report.offers or self.menu
        self.plain = running.report.plain or self.plain
        if running.excess_bytes is not None:
            self.excess_bytes[running.plan.saved] = running.excess_bytes

    def forget_plans(self) -> None:
        """Drop the compiled plans for smaller sizes and their excess bytes: at larger sizes their peaks differ."""
        self.known.clear()
        self.excess_bytes.clear()

    def __call__(self, *args: Any) -> Any:
        """Run the graph; without hooks on fake tensors, which torch passes, for example, to split a graph at DDP's buckets."""
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
        """Run the backward of a call inside its hooks; autograd calls this method through the call's node."""
        for hook in reversed(self.hooks):
            run = functools.partial(hook.backward, call, run)
        gradients = run(*arguments)
        for hook in self.hooks:
            hook.after_backward(call)
        if call.state is CallState.AWAITING_BACKWARD:
            call.move(CallEvent.RETAINED if keeps_its_graph() else CallEvent.RELEASED)
        return gradients


class _Pending:
    """Held by the autograd node of a call: keeps the region alive for the backward, and ends the call when the node is freed."""

    def __init__(self, region: CompiledRegion, call: CallInFlight) -> None:
        self.region, self.call = region, call

    def __call__(self, node: Any, original: Backward, arguments: tuple[Any, ...]) -> Any:
        return self.region.backward(self.call, functools.partial(original, node), arguments)

    def __del__(self) -> None:
        if self.call.state is CallState.AWAITING_BACKWARD:
            self.call.move(CallEvent.DROPPED)
