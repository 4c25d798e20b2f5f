"""Whether a graph must expect others in its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from compile_remat._torch.step_peers import company

SEEN: list[str] = []
X = torch.ones(2, 4)


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    SEEN.append(company(gm))
    forward: Callable[..., Any] = gm.forward
    return forward


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    SEEN.clear()
    yield
    torch.compiler.reset()


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.inner(x))


def test_a_whole_model_or_function_is_alone() -> None:
    torch.compile(Outer(), backend=backend)(X)
    model = Outer()
    torch.compile(lambda x: model(x).sum(), backend=backend)(X)
    torch.compiler.reset()
    model.compile(backend=backend)
    model(X)
    assert SEEN == ["", "", ""]


def test_a_part_of_a_model_is_not() -> None:
    model = Outer()
    model.inner.compile(backend=backend)
    model(X)
    assert SEEN == ["it is compiled inside of a Outer"]


def test_what_ends_in_a_graph_break_is_not() -> None:
    def function(x: Tensor) -> Tensor:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x)

    torch.compile(function, backend=backend)(X)
    assert SEEN == ["it ends in a graph break", ""]


@pytest.mark.company
def test_something_else_that_has_not_run_yet() -> None:
    first, second = (torch.compile(Outer(), backend=backend) for _ in range(2))
    first(X)
    second(X)
    assert SEEN == ["something else is compiled with this backend, too"]  # the second runs the code of the first


@pytest.mark.company
def test_what_is_garbage_does_not_count() -> None:
    first = torch.compile(Outer(), backend=backend)
    torch.compile(Outer(), backend=backend)
    first(X)
    assert SEEN == [""]


@pytest.mark.company
def test_another_backend_does_not_count() -> None:
    first, second = torch.compile(Outer(), backend=backend), torch.compile(Outer(), backend="eager")
    first(X)
    second(X)
    assert SEEN == [""]
