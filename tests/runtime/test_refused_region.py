"""A budget that does not hold at one size of a graph says so of that size alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat import BudgetError
from compile_remat.backend import remat
from compile_remat.device.measure import peak_bytes
from tests.threads import run_at_once

pytestmark = pytest.mark.usefixtures("own_caches")

BUDGET = 1 << 20
COMPILERS = ["eager", pytest.param("inductor", marks=pytest.mark.full)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU())])


def compiled(compiler: str, *, dynamic: bool | None = True, **options: Any) -> Any:
    options = {"memory_budget": BUDGET, "compiler": compiler, **options}
    return torch.compile(model(), backend=remat, dynamic=dynamic, options=options)


def step(call: Any, rows: int) -> torch.Tensor:
    """The gradient of the input."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    call.zero_grad(set_to_none=True)
    (gradient,) = torch.autograd.grad(call(x).square().sum(), x)
    return gradient


def refusal(call: Any, rows: int) -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        step(call, rows)
    return caught.value


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("first", [400, 8192], ids=["after a plan", "at the first call"])
def test_an_error_has_the_floor_and_the_tensors_of_its_own_size(compiler: str, first: int) -> None:
    call = compiled(compiler)
    for rows in (first, 8192, 4096, 8192):
        if rows > 400:
            error = refusal(call, rows)
            assert error.largest[0].shape == (rows, 64)
            assert error.floor_bytes / (rows * 64 * 4) == pytest.approx(4, rel=0.03)  # as alone
        else:
            step(call, rows)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.full), True])
def test_smaller_sizes_train_after_a_refusal(compiler: str, dynamic: bool | None) -> None:
    """As where a batch size is searched for: 40 rows and 400 lie on different sides of what Inductor assumes."""
    call = compiled(compiler, dynamic=dynamic)
    for rows in (8192, 4096):
        refusal(call, rows)
    for rows in (400, 40, 450, 400):
        torch.testing.assert_close(step(call, rows), step(model(), rows), rtol=1e-4, atol=1e-5)
        if compiler == "inductor":
            x = torch.randn(rows, 64, requires_grad=True)
            call.zero_grad(set_to_none=True)
            peak = peak_bytes(lambda x=x: call(x).backward(x.detach()), "cpu")  # type: ignore[misc]
            assert peak.peak_bytes <= BUDGET
    found = compile_remat.reports()
    assert found and all(report.plan is not None and report.runs_now for report in found)


def test_each_thread_gets_the_error_of_its_own_size() -> None:
    call = compiled("eager")
    seen: dict[int, object] = {}

    def train(rows: int) -> None:
        try:
            step(call, rows)
            seen[rows] = None
        except BudgetError as error:
            seen[rows] = error.largest[0].shape

    for _ in range(2):  # the second time the errors are known
        run_at_once(*(partial(train, rows) for rows in (4096, 8192, 400, 2048)))
        assert seen == {rows: (rows, 64) if rows > 400 else None for rows in (4096, 8192, 400, 2048)}


@pytest.mark.parametrize("first", [400, 8192], ids=["after a plan", "at the first call"])
def test_a_known_refusal_plans_nothing_and_holds_no_tensor(first: int, planned: list[int]) -> None:
    call = compiled("eager")
    if first == 400:
        step(call, first)
    refusal(call, 8192)
    count = len(planned)
    x = torch.randn(8192, 64, requires_grad=True)
    seen = weakref.ref(x)
    for _ in range(2):
        with pytest.raises(BudgetError):
            call(x)
    del x
    assert seen() is None and len(planned) == count


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each search for a plan."""
    from compile_remat.planning import joint_planning

    found: list[int] = []
    choose = joint_planning.choose

    def counted(*args: Any, **keywords: Any) -> Any:
        found.append(1)
        return choose(*args, **keywords)

    monkeypatch.setattr(joint_planning, "choose", counted)
    return found


def test_inputs_that_share_memory_are_not_traced_again() -> None:
    """The error then names the sizes that its figures belong to."""
    net = model()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (net(x) + net(y)).square().sum()

    call: Callable[..., torch.Tensor] = torch.compile(
        loss, backend=remat, dynamic=True, options={"memory_budget": BUDGET, "compiler": "eager"}
    )
    for rows in (4096, 100):
        whole = torch.randn(2 * rows, 64)
        with pytest.raises(BudgetError) as caught:
            call(whole[:rows], whole[rows:])
    assert "These are the figures of" in caught.value.__notes__[0] and "100" in caught.value.__notes__[0]


def test_graphs_of_one_step_have_the_error_of_its_size() -> None:
    """If one of two graphs alone exceeds the budget, the error comes at once, and not a warning and the next step's error."""
    first, second = model(), model()

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x).square().mean()  # type: ignore[no-any-return]

    options = {"memory_budget": BUDGET, "compiler": "eager"}
    call: Callable[..., torch.Tensor] = torch.compile(broken, backend=remat, dynamic=True, options=options)
    for rows in (1500, 4096, 300, 1500, 300):
        if rows == 300:
            call(torch.randn(rows, 64)).backward()
            continue
        with pytest.raises(BudgetError) as caught:
            call(torch.randn(rows, 64))
        assert caught.value.largest[0].shape == (rows, 64)
