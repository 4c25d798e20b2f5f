"""The state machines of the runtime, edge by edge, on regions of a few numbers: nothing is compiled."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_remat._util.size_range import Sizes
from compile_remat.budget import MemoryBudget
from compile_remat.errors import PlannerWarning
from compile_remat.passes import Plan, PlanOption, Status
from compile_remat.planning.request import Fit, FitBelow, Replay, Request, SharedOption
from compile_remat.report import Report
from compile_remat.runtime import states
from compile_remat.runtime.oom_recovery import OomRecovery
from compile_remat.runtime.region import CallInFlight, CompiledRegion, Hook, RunningPlan
from compile_remat.runtime.shared_budget import CHANGES, SharedBudget
from compile_remat.runtime.states import CALL_TRANSITIONS, PLAN_TRANSITIONS, CallEvent, CallState, PlanEvent, PlanState
from tests.threads import run_at_once

MENU = (
    PlanOption(("large",), held_bytes=40, forward_peak_bytes=50, peak_bytes=60, time_ns=0),
    PlanOption(("small",), held_bytes=10, forward_peak_bytes=30, peak_bytes=40, time_ns=5),
)
"""Two calls under the large plan need 40 + 60 bytes, three of them 140."""


def graph(fail_forward: list[Exception] | None = None, fail_backward: list[Exception] | None = None) -> Any:
    """AOTAutograd's function for ``2 * x``; each list holds errors still to be raised."""

    class Doubled(torch.autograd.Function):
        compiled_fw = None  # the mark of AOTAutograd's classes

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if fail_forward:
                raise fail_forward.pop()
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            if fail_backward:
                raise fail_backward.pop()
            assert len(ctx.saved_tensors) == 1
            return 2 * grads[0]

    return lambda x: (Doubled.apply(x),)


def running(option: PlanOption, *, with_menu: bool = False, compiled: Any = None) -> RunningPlan:
    plan = Plan(
        problem_key="key",
        status=Status.FEASIBLE,
        budget_bytes=None,
        saved=option.saved,
        recomputed=(),
        peak_bytes=option.peak_bytes,
        forward_peak_bytes=option.forward_peak_bytes,
        saved_bytes=option.held_bytes,
        once_time_ns=100,
        recompute_time_ns=0,
        extra_time_ns=option.time_ns,
        bound_time_ns=0,
    )
    return RunningPlan(compiled or graph(), Report("key", "100", 100, plan, offers=MENU if with_menu else ()))


def recompiled(request: Request, sizes: Sizes = ()) -> RunningPlan | None:
    """A compiler that has both plans of the menu."""
    match request:
        case Replay(saved):
            return running(next(option for option in MENU if option.saved == saved))
        case SharedOption():
            return running(MENU[1], with_menu=True)
        case Fit():
            return running(MENU[0])
        case FitBelow(target_bytes):
            option = next((o for o in MENU if o.peak_bytes <= target_bytes), MENU[1])
            return running(option)
    return None


def region_of(
    *hooks: Hook,
    with_menu: bool = False,
    compiled: Any = None,
    recompile: Callable[..., RunningPlan | None] = recompiled,
) -> CompiledRegion:
    first = running(MENU[0], with_menu=with_menu, compiled=compiled)
    return CompiledRegion(first, hooks, recompile, lambda report: None)


def shared(budget_bytes: int = 1000) -> SharedBudget:
    return SharedBudget(MemoryBudget("bytes", budget_bytes))


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def step(*regions: CompiledRegion) -> None:
    """A forward of each, then the backwards."""
    total = torch.zeros(())
    for region in regions:
        (y,) = region(leaf())
        total = total + y.sum()
    total.backward()


def recovery(**options: Any) -> OomRecovery:
    arguments = {"retries": 1, "device": torch.device("cpu"), "available": lambda: None, "written": frozenset()}
    return OomRecovery(**{**arguments, **options})


def no_memory() -> list[Exception]:
    return [torch.OutOfMemoryError("out of memory, said the test")]


# -- the edges --------------------------------------------------------------------------------------------------------

Edge = tuple[Any, Any]
WALKS: dict[Edge, Callable[[], None]] = {}


def walks(*edges: Edge) -> Callable[[Callable[[], None]], None]:
    """The decorated function makes a region or a call go over these edges."""
    return lambda walk: WALKS.update(dict.fromkeys(edges, walk))


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Edge, Any]]:
    """The edges that regions and calls went over, with the state behind each."""
    seen: dict[Edge, Any] = {}
    for owner in (CompiledRegion, CallInFlight):

        def move(self: Any, event: Any, original: Any = owner.move) -> None:
            before = self.state
            original(self, event)
            seen[before, event] = self.state

        monkeypatch.setattr(owner, "move", move)
    yield seen


EDGES = {**PLAN_TRANSITIONS, **CALL_TRANSITIONS}


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge[0]}, {edge[1]}")
def test_every_edge_can_be_walked(edge: Edge, walked: dict[Edge, Any]) -> None:
    WALKS[edge]()
    assert walked[edge] == EDGES[edge]
    assert walked.items() <= EDGES.items()


def test_the_tables_in_code_docstring_and_test_agree() -> None:
    rows = [line.split("  ") for line in (states.__doc__ or "").splitlines() if line.startswith("    ")]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    documented = {(state, event): after for state, event, after, _ in cells if state != "state"}
    assert documented == EDGES and len(documented) == len(cells) - 2  # members of a StrEnum are their texts
    assert WALKS.keys() == EDGES.keys()
    born = {PlanState.EXCLUSIVE, PlanState.EXPECTING, CallState.FORWARD}
    assert {*PlanState, *CallState} == {*EDGES.values()} | born


@walks((PlanState.EXCLUSIVE, PlanEvent.PEERS_SEEN))
def _() -> None:
    budget = shared()
    first, second = region_of(budget), region_of(budget)
    step(first, second)
    first(leaf())
    assert second.state is PlanState.REPLAN_SHARED


@walks((PlanState.EXCLUSIVE, PlanEvent.NO_ROOM))
def _() -> None:
    budget = shared(80)
    first, second = region_of(budget), region_of(budget)
    step(first, second)
    assert (first.state, second.state) == (PlanState.EXCLUSIVE, PlanState.OFFERING)


@walks((PlanState.EXCLUSIVE, PlanEvent.BUDGET_FELL))
def _() -> None:
    budget = shared()
    region = region_of(budget)
    budget.reread = lambda gradient_bytes: MemoryBudget("bytes", 50)
    step(region)
    step(region)
    assert budget.budget.value == 50 and region.state is PlanState.EXCLUSIVE


@walks((PlanState.EXPECTING, PlanEvent.PEERS_SEEN))
def _() -> None:
    budget = shared()
    first, second = region_of(budget, with_menu=True), region_of(budget)
    step(first, second)
    first(leaf())
    assert first.state is PlanState.OFFERING  # until its peer has a menu, too


@walks((PlanState.EXPECTING, PlanEvent.NO_PEER_SEEN), (PlanState.REPLAN_EXCLUSIVE, PlanEvent.REPLANNED))
def _() -> None:
    region = region_of(shared(), with_menu=True)
    step(region)
    step(region)
    assert region.state is PlanState.EXCLUSIVE and region.menu == ()


@walks((PlanState.REPLAN_EXCLUSIVE, PlanEvent.PEERS_IN_FLIGHT))
def _() -> None:
    budget = shared()
    region, other = region_of(budget, with_menu=True), region_of(budget)
    step(region)
    step(other, region)
    assert region.state is PlanState.EXPECTING and region.menu


@walks((PlanState.REPLAN_EXCLUSIVE, PlanEvent.FAILED))
def _() -> None:
    region = region_of(shared(), with_menu=True, recompile=lambda request, sizes: None)
    before = region.running
    for _ in range(3):
        step(region)
    assert region.state is PlanState.FROZEN and region.running is before


@walks((PlanState.REPLAN_SHARED, PlanEvent.REPLANNED))
def _() -> None:
    budget = shared()
    first, second = region_of(budget), region_of(budget)
    step(first, second)
    step(first, second)
    assert first.state is second.state is PlanState.OFFERING


@walks((PlanState.REPLAN_SHARED, PlanEvent.FAILED))
def _() -> None:
    budget = shared()
    first, second = region_of(budget, recompile=lambda request, sizes: None), region_of(budget, with_menu=True)
    for _ in range(3):
        step(first, second)
    assert (first.state, second.state) == (PlanState.FROZEN, PlanState.OFFERING)


@walks((PlanState.OFFERING, PlanEvent.ALLOCATED))
def _() -> None:
    budget = shared(90)
    first, second = region_of(budget, with_menu=True), region_of(budget, with_menu=True)
    step(first, second)
    step(first, second)
    assert first.state is second.state is PlanState.SHARED
    assert {first.running.plan.saved, second.running.plan.saved} == {("large",), ("small",)}


@walks((PlanState.SHARED, PlanEvent.ALLOCATED))
def _() -> None:
    budget = shared(100)
    first, second = region_of(budget, with_menu=True), region_of(budget, with_menu=True)
    for regions in ((first, second), (first, second, second), (first, second)):
        step(*regions)
    assert first.state is PlanState.SHARED and second.running.plan.saved == ("small",)


@walks((PlanState.SHARED, PlanEvent.CHANGED_OFTEN))
def _() -> None:
    budget = shared(100)
    region = region_of(budget, with_menu=True)
    for k in range(2 * CHANGES):
        step(*[region] * (2 + k % 2))
    assert region.state is PlanState.FROZEN and region.num_changes == CHANGES


@walks((CallState.FORWARD, CallEvent.RETRIED))
def _() -> None:
    region = region_of(recovery(), compiled=graph(fail_forward=no_memory()))
    x = leaf()
    with pytest.warns(PlannerWarning, match="planned again"):
        (y,) = region(x)
    y.sum().backward()
    assert region.running.plan.saved == ("small",) and x.grad is not None and x.grad.tolist() == [2, 2, 2]


@walks((CallState.FORWARD, CallEvent.RETURNED))
def _() -> None:
    kept = region_of()(leaf())
    assert kept[0].requires_grad


@walks((CallState.FORWARD, CallEvent.NO_BACKWARD))
def _() -> None:
    budget = shared()
    region = region_of(budget, compiled=graph(fail_forward=[ZeroDivisionError()]))
    with pytest.raises(ZeroDivisionError):
        region(leaf())
    assert budget.calls_in_flight == []
    step(region)


@walks((CallState.AWAITING_BACKWARD, CallEvent.RETRIED))
def _() -> None:
    region = region_of(recovery(), compiled=graph(fail_backward=no_memory()))
    x = leaf()
    (y,) = region(x)
    with pytest.warns(PlannerWarning, match="planned again"):
        y.sum().backward()
    assert region.running.plan.saved == ("small",) and x.grad is not None and x.grad.tolist() == [2, 2, 2]


@walks((CallState.AWAITING_BACKWARD, CallEvent.RETAINED))
def _() -> None:
    budget = shared()
    (y,) = region_of(budget)(leaf())
    y.sum().backward(retain_graph=True)
    assert [call.state for call in budget.calls_in_flight] == [CallState.AWAITING_BACKWARD]
    y.sum().backward()
    assert budget.calls_in_flight == []


@walks((CallState.AWAITING_BACKWARD, CallEvent.RELEASED))
def _() -> None:
    budget = shared()
    step(region_of(budget))
    assert budget.in_flight_bytes == 0


@walks((CallState.AWAITING_BACKWARD, CallEvent.DROPPED))
def _() -> None:
    budget = shared()
    outputs = region_of(budget)(leaf())
    assert budget.in_flight_bytes == 40
    del outputs
    assert budget.calls_in_flight == []


# -- beside the tables ------------------------------------------------------------------------------------------------


def test_a_second_backward_is_torchs_error_and_changes_nothing() -> None:
    budget = shared()
    region = region_of(budget)
    (y,) = region(leaf())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    assert budget.calls_in_flight == []
    step(region)


def test_a_dropped_model_leaves_nothing_behind() -> None:
    """Neither the budget nor a class of autograd keeps a region; a loss that is still there does, for its backward."""
    budget = shared()
    region, x = region_of(budget, recovery()), leaf()
    gone = weakref.ref(region)
    (y,) = region(x)
    del region
    y.sum().backward()
    assert x.grad is not None
    del y
    gc.collect()
    assert gone() is None
    other = region_of(budget)
    step(other)
    assert other.state is PlanState.EXCLUSIVE and not budget.expects_peers


def test_steps_are_compared_by_regions_that_are_alive() -> None:
    """A new pair of regions is given plans, although its steps look like those of the pair before."""
    budget = shared(90)
    for _ in range(2):
        first, second = region_of(budget, with_menu=True), region_of(budget, with_menu=True)
        step(first, second)
        step(first, second)
        assert first.state is second.state is PlanState.SHARED
        del first, second
        gc.collect()


def test_threads_have_calls_of_their_own() -> None:
    budget = shared(10_000)
    region = region_of(budget, recovery())
    at_once = threading.Barrier(4, timeout=10)

    def train() -> None:
        for _ in range(20):
            at_once.wait()
            x = leaf()
            (y,) = region(x)
            at_once.wait()
            assert len(budget.calls_in_flight) == 1
            at_once.wait()
            y.sum().backward()
            assert x.grad is not None and x.grad.tolist() == [2, 2, 2]

    run_at_once(*[train] * 4)
    assert budget.calls_in_flight == []
    assert region.state is PlanState.EXCLUSIVE  # each thread's step has one call


def test_without_gradients_a_region_is_its_compiled_code() -> None:
    class Refusing(Hook):
        def before_forward(self, call: CallInFlight, args: Any) -> None:
            raise AssertionError("nothing waits for a backward")

    region = region_of(Refusing())
    with torch.no_grad():
        (y,) = region(leaf())
    assert y.tolist() == [2, 2, 2]
    assert region(torch.ones(3))[0].grad_fn is None


def test_hooks_surround_a_call_in_their_order() -> None:
    said: list[str] = []

    class Saying(Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def called(self, region: CompiledRegion) -> None:
            said.append(f"called {self.name}")

        def before_forward(self, call: CallInFlight, args: Any) -> None:
            said.append(f"before {self.name}")

        def forward(self, call: CallInFlight, run: Any, *args: Any) -> Any:
            said.append(f"forward {self.name}")
            return run(*args)

        def backward(self, call: CallInFlight, run: Any, *arguments: Any) -> Any:
            said.append(f"backward {self.name}")
            return run(*arguments)

        def after_backward(self, call: CallInFlight) -> None:
            said.append(f"after {self.name}")

    step(region_of(Saying("a"), Saying("b")))
    parts = ("called", "before", "forward", "backward", "after")
    assert said == [f"{part} {name}" for part in parts for name in "ab"]


def test_after_running_out_of_memory_no_larger_option_is_on_the_menu() -> None:
    budget = shared(100)
    region = region_of(budget, recovery(), with_menu=True, compiled=graph(fail_forward=no_memory()))
    with pytest.warns(PlannerWarning, match="planned again"):
        step(region, region)
    step(region, region)
    assert region.state is PlanState.SHARED and region.menu == MENU[1:] and region.running.plan.saved == ("small",)


def test_calls_of_two_threads_that_overlap_are_not_one_step() -> None:
    """Together they need 40 + 60 bytes of 90; each thread's step has one call, whatever else runs at the same moment."""
    budget = shared(90)
    first, second = region_of(budget, with_menu=True), region_of(budget, with_menu=True)
    for k in range(3):
        (y,) = first(leaf())
        with nullcontext() if k else pytest.warns(PlannerWarning, match="several threads"):
            run_at_once(lambda: step(second))
        y.sum().backward()
    assert first.running.plan.saved == second.running.plan.saved == ("large",)


def test_a_forward_inside_a_backward_of_another_thread_belongs_to_its_step() -> None:
    """`torch.utils.checkpoint` does this on a device, whose backwards run in a thread of their own."""
    budget = shared()
    region, seen = region_of(budget), list[int]()

    class Checkpointed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            with torch.enable_grad():
                (y,) = region(leaf())
                seen.append(len(budget.calls_in_flight))
                y.sum().backward()
            return gradients[0]

    (kept,) = region(leaf())
    loss = Checkpointed.apply(leaf()).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlannerWarning)
        run_at_once(loss.backward)
    assert seen == [2]
    del kept
