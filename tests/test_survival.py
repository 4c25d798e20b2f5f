"""What a training run survives: graphs, folders, files and threads that nobody planned for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_remat
from compile_remat.backend import remat
from compile_remat.errors import PlannerWarning


@pytest.fixture(autouse=True)
def _fresh(own_caches: object) -> Iterator[None]:
    """No plan fails silently: torch's own choice of saved tensors comes with a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlannerWarning)
        yield


def compiled(function: Callable[..., Any], budget: object = "min", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=remat, options={"memory_budget": budget, "compiler": "eager", **options})


# -- graphs -----------------------------------------------------------------------------------------------------------


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.view(2, 3)


@pytest.mark.parametrize("budget", ["min", "max"])
@pytest.mark.parametrize("function", [lambda x: (_Flat.apply(x),), lambda x: x.unbind(0)], ids=["view", "unbind"])
def test_a_graph_with_nothing_to_save(function: Callable[[Tensor], tuple[Tensor, ...]], budget: str) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    torch.stack([y.sum() for y in compiled(function, budget)(x)]).sum().backward()
    assert x.grad is not None and x.grad.eq(1).all()
    (report,) = compile_remat.reports()
    assert report.status != "FALLBACK" and report.plan is not None and report.plan.saved == ()


@pytest.mark.parametrize("budget", ["min", "max"])
def test_jagged_nested_tensors(budget: object) -> None:
    """A jagged dimension has a symbol for its size that is no number."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    rows = [torch.linspace(-1, 1, 16 * length).reshape(length, 16) for length in (3, 5)]

    def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        model.zero_grad()
        torch.nested.to_padded_tensor(call(x), 0.0).square().sum().backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad

    expected = gradient(model)
    torch.testing.assert_close(gradient(compiled(model, budget)), expected)
    (report,) = compile_remat.reports()
    assert report.status != "FALLBACK"
