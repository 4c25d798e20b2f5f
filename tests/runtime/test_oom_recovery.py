"""Out of memory, at every place where a small graph allocates: the step is planned again and comes out the same."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_remat
from compile_remat import PlannerWarning
from compile_remat._util.units import format_bytes
from compile_remat.backend import remat
from compile_remat.device.measure import peak_bytes
from compile_remat.planning import deadline, joint_planning
from compile_remat.runtime import oom_recovery
from compile_remat.runtime.oom_recovery import SMALL_BYTES, OomRecovery
from compile_remat.runtime.region import CompiledRegion

PLACES = 42
"""Allocations of a step of `Net`."""

REAL_EMPTY = torch._C._dynamo.guards._empty_strided_cpu


class Allocations:
    """Counts allocations of compiled code and fails where it is told to."""

    def __init__(self) -> None:
        self.seen = 0
        self.fail_at: frozenset[int] = frozenset()
        self.made: list[weakref.ref[Tensor]] | None = None

    def check(self) -> None:
        self.seen += 1
        if self.seen in self.fail_at:
            raise torch.OutOfMemoryError("out of memory, said the test")

    def start(self, *fail_at: int) -> None:
        self.seen, self.fail_at = 0, frozenset(fail_at)


ALLOCATIONS = Allocations()


def _empty_strided_cpu(*args: Any) -> Tensor:
    ALLOCATIONS.check()
    made: Tensor = REAL_EMPTY(*args)
    if ALLOCATIONS.made is not None:
        ALLOCATIONS.made.append(weakref.ref(made))
    return made


@torch.library.custom_op("remat_test_retry::copy", mutates_args=())
def copied(x: Tensor) -> Tensor:
    """An operator that may fail, forward and backward, also where a graph runs operator by operator."""
    ALLOCATIONS.check()
    return x.clone()


copied.register_fake(torch.empty_like)
copied.register_autograd(lambda ctx, grad: copied(grad))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, own_caches: Path) -> Iterator[None]:
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", _empty_strided_cpu)
    ALLOCATIONS.start()
    yield
    ALLOCATIONS.start()


class Net(nn.Module):
    """Dropout, a buffer that every forward writes into, and enough layers for a lower plan."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64) if norm else nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = nn.functional.dropout(torch.sin(torch.tanh(layer(x))), 0.2)
        return x.square().mean()


X = torch.linspace(-1, 1, 256 * 32).reshape(256, 32)


class Run:
    """One model, trained for steps that may fail at one allocation."""

    def __init__(self, budget: object = "max", *, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = model or Net()
        self.call = torch.compile(self.model, backend=remat, options={"memory_budget": budget, **options})

    def step(self, *fail_at: int, seed: int = 1) -> list[Tensor]:
        """Loss, gradients, buffers and the next random number; each step adds to the gradients of the one before."""
        torch.manual_seed(seed)
        ALLOCATIONS.start(*fail_at)
        loss = self.call(X)
        loss.backward()
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        return [loss.detach(), *gradients, *(b.clone() for b in self.model.buffers()), torch.rand(3)]


@functools.cache
def undisturbed_steps() -> list[list[Tensor]]:
    """Three steps at which every allocation succeeds; gradients add up over them."""
    run = Run()
    return [run.step(seed=seed) for seed in (1, 2, 3)]


@pytest.fixture
def expected() -> list[list[Tensor]]:
    """Computed by the first test that asks for it; a test starts with no report of that."""
    steps = undisturbed_steps()
    torch.compiler.reset()
    compile_remat.reset_reports()
    return steps


def same(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_every_allocation_of_a_step_may_fail(expected: list[list[Tensor]], is_full: bool) -> None:
    """All of them with --full, else the first, in the forward, and the last, in the backward."""
    for place in range(1, PLACES + 1, 1 if is_full else PLACES - 1):
        torch.compiler.reset()
        run = Run()
        same(run.step(), expected[0])
        with pytest.warns(PlannerWarning, match="planned again"):
            same(run.step(place, seed=2), expected[1])
        assert ALLOCATIONS.seen > place
        same(run.step(seed=3), expected[2])
        *_, first, second = compile_remat.reports()
        assert second.predicted_peak_bytes < first.predicted_peak_bytes  # type: ignore[operator]
        assert "out of memory" in second.message


@pytest.mark.usefixtures("empty_kernels")
def test_places_are_all_there_are() -> None:
    run = Run()
    run.step()
    run.step()
    assert ALLOCATIONS.seen == PLACES


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_operator_by_operator(place: int) -> None:
    w = (torch.randn(32, 32) / 8).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return copied(deep(copied(deep(x, w) + x), w) + x)

    call = torch.compile(function, backend=remat, options={"memory_budget": "max", "compiler": "eager"})
    call(torch.ones(64, 32)).sum().backward()
    assert w.grad is not None
    once, w.grad = w.grad, None
    ALLOCATIONS.start(place)
    with pytest.warns(PlannerWarning, match="planned again"):
        call(torch.ones(64, 32)).sum().backward()
    assert ALLOCATIONS.seen > 4
    torch.testing.assert_close(w.grad, once)


@pytest.mark.parametrize(
    "place", [pytest.param(2, marks=pytest.mark.proof), pytest.param(PLACES - 2, marks=pytest.mark.full)]
)
def test_the_first_step_of_all(expected: list[list[Tensor]], place: int) -> None:
    torch.compiler.reset()
    with pytest.warns(PlannerWarning, match="planned again"):
        same(Run().step(place), expected[0])


def test_under_a_budget(expected: list[list[Tensor]]) -> None:
    run = Run(0.8)
    run.step()
    with pytest.warns(PlannerWarning, match="planned again"):
        same(run.step(PLACES - 2, seed=2), expected[1])


def test_under_a_budget_with_the_clock_in_the_way(
    expected: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(0.8)
    run.step()
    seconds = itertools.chain(itertools.repeat(0.0, 5), itertools.count(1e6))
    monkeypatch.setattr(deadline, "monotonic", lambda: next(seconds))
    with pytest.warns(PlannerWarning, match="stopped by the clock"):
        same(run.step(PLACES - 2, seed=2), expected[1])
    assert "stopped by the clock" in compile_remat.reports()[-1].message


def test_as_often_as_it_says(expected: list[list[Tensor]]) -> None:
    run = Run(oom_retry=2)
    run.step()
    with pytest.warns(PlannerWarning, match="planned again"):
        same(run.step(3, 6, seed=2), expected[1])  # fails, and fails again
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(3, seed=3)
    assert "as often as oom_retry allows" in caught.value.__notes__[0]


@pytest.mark.usefixtures("empty_kernels")
def test_without_it_the_error_is_torchs() -> None:
    run = Run(oom_retry=0)
    run.step()
    for place in (3, PLACES - 2):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run.step(place)
        assert not hasattr(caught.value, "__notes__")


@pytest.mark.usefixtures("empty_kernels")
def test_the_lowest_plan_cannot_be_lowered() -> None:
    run = Run("min")
    run.step()
    lowest = compile_remat.reports()[-1].floor_bytes
    with pytest.raises(torch.OutOfMemoryError, match="said the test") as caught:
        run.step(3)
    assert lowest is not None
    assert "the plan that ran is the lowest" in caught.value.__notes__[0]
    assert format_bytes(lowest) in caught.value.__notes__[0]


@pytest.mark.usefixtures("empty_kernels")
def test_nothing_is_kept_where_no_plan_is_lower() -> None:
    """The gradient that comes in dies in the backward, as without oom_retry; here it is alive at the peak otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    x = torch.randn(64, 256)
    peaks = {}
    for budget in ("min", "max"):
        for oom_retry in (0, 1):
            torch.compiler.reset()
            step = torch.compile(model, backend=remat, options={"memory_budget": budget, "oom_retry": oom_retry})

            def train() -> None:
                model.zero_grad(set_to_none=True)
                step(x).mean().backward()  # noqa: B023

            train()
            model.zero_grad(set_to_none=True)
            peaks[budget, oom_retry] = peak_bytes(train, "cpu").peak_bytes
    assert peaks["min", 1] == peaks["min", 0] == peaks["max", 0]  # which is gradients; nor do shared budgets keep it
    assert peaks["max", 1] == peaks["max", 0] + x.nbytes  # copies for a second try


@pytest.mark.usefixtures("empty_kernels")
def test_a_planner_that_fails_leaves_torchs_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("no plan")

    monkeypatch.setattr(joint_planning.Planner, "within", fail)
    with pytest.raises(torch.OutOfMemoryError, match="said the test") as caught:
        run.step(3)
    assert "planning again failed (PlannerFailed: ZeroDivisionError: no plan)" in caught.value.__notes__[0]
    assert len(compile_remat.reports()) == 1


class Square(torch.autograd.Function):
    """Does something to the inputs of a graph between its forward and its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return grad, None


def deep(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(6):
        x = torch.sin(torch.tanh(x @ w))
    return x.sum()


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda held: held[0].add_(1), "has been changed since the forward"),
        (lambda held: held.clear(), "has been freed since the forward"),
    ],
    ids=["changed", "freed"],
)
def test_what_the_forward_read_must_still_be_there(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[list[Tensor]], None], why: str
) -> None:
    monkeypatch.setattr(oom_recovery, "SMALL_BYTES", 0)
    w = torch.randn(32, 32, requires_grad=True)
    call = torch.compile(lambda x, w: deep(x.sin(), w), backend=remat, options={"memory_budget": "max"})
    call(torch.randn(256, 32), w).backward()
    held = [torch.randn(256, 32)]
    loss = Square.apply(call(held[0], w), lambda: act(held))
    ALLOCATIONS.start(2)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loss.backward()
    assert why in caught.value.__notes__[0]


@pytest.mark.usefixtures("empty_kernels")
def test_a_large_buffer_that_the_forward_overwrites_is_not_copied() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))
            self.cache: Tensor
            self.register_buffer("cache", torch.zeros(SMALL_BYTES // 64, 64))

        def forward(self, x: Tensor) -> Tensor:
            self.cache.add_(1)
            for _ in range(6):
                x = torch.sin(torch.tanh(x @ self.w))
            return x.sum()

    model = Cached()
    call = torch.compile(model, backend=remat, options={"memory_budget": "max"})
    x = torch.randn(256, 64)
    call(x).backward()
    ALLOCATIONS.start(2)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        call(x)
    assert "no copy is kept" in caught.value.__notes__[0]


def test_gradients_of_other_graphs_stay() -> None:
    def grads(*fail_at: int) -> list[Tensor]:
        torch.manual_seed(0)
        first, second = Net(norm=False), Net(norm=False)
        calls = [torch.compile(m, backend=remat, options={"memory_budget": "max"}) for m in (first, second)]
        for _ in range(2):
            loss = calls[0](X) * 2 + calls[1](X)
        for model in (first, second):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        ALLOCATIONS.start(*fail_at)
        loss.backward()
        return [p.grad for m in (first, second) for p in m.parameters() if p.grad is not None]

    undisturbed = grads()
    count = ALLOCATIONS.seen
    for place in (3, count - 3):  # in either graph's backward
        torch.compiler.reset()
        with pytest.warns(PlannerWarning, match="planned again"):
            same(grads(place), undisturbed)


def test_a_second_backward_of_one_forward() -> None:
    w, x = (torch.randn(32, 32) / 8).requires_grad_(), torch.randn(256, 32)
    call = torch.compile(deep, backend=remat, options={"memory_budget": "max"})
    call(x, w).backward(retain_graph=True)
    once, loss = w.grad, call(x, w)
    assert once is not None
    w.grad = None
    loss.backward(retain_graph=True)
    ALLOCATIONS.start(2)
    with pytest.warns(PlannerWarning, match="planned again"):
        loss.backward()
    torch.testing.assert_close(w.grad, 2 * once)


@pytest.mark.usefixtures("empty_kernels")
def test_tensors_of_the_failed_run_are_gone_when_the_next_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    left: list[int] = []
    plan_lower = OomRecovery._plan_lower

    def look(self: OomRecovery, region: CompiledRegion, failure: torch.OutOfMemoryError) -> None:
        gc.collect()
        left.append(sum(r() is not None for r in made))
        plan_lower(self, region, failure)

    run = Run(model=Net(norm=False))
    run.step()
    monkeypatch.setattr(OomRecovery, "_plan_lower", look)
    monkeypatch.setattr(ALLOCATIONS, "made", made)
    with pytest.warns(PlannerWarning, match="planned again"):
        run.step(6, seed=2)
    assert len(made) >= 5
    assert left == [0]
