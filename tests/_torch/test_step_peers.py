"""Facts that Dynamo has about other graphs of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from compile_remat._torch.tensor_arguments import ends_in_graph_break

SEEN: list[bool] = []
X = torch.ones(2, 4)


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    SEEN.append(ends_in_graph_break(gm))
    forward: Callable[..., Any] = gm.forward
    return forward


@pytest.fixture(autouse=True)
def _nothing_is_seen(fresh: None) -> None:
    SEEN.clear()


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.cos(x))


def test_a_whole_model_or_function_has_no_graph_break() -> None:
    torch.compile(Model(), backend=backend)(X)
    model = Model()
    torch.compile(lambda x: model(x).sum(), backend=backend)(X)
    torch.compiler.reset()
    model.compile(backend=backend)
    model(X)
    assert SEEN == [False, False, False]


def test_each_graph_before_a_break_ends_in_one() -> None:
    def function(x: Tensor) -> Tensor:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        x = torch.cos(x)
        if x.sum() > 0:  # breaks as well: it depends on data
            x = torch.exp(x)
        return torch.tanh(x)

    torch.compile(function, backend=backend)(X)
    assert SEEN == [True, True, False]


def test_a_callable_that_is_compiled_separately_is_unknown() -> None:
    first, second = (torch.compile(fn, backend=backend) for fn in (torch.sin, torch.cos))
    second(first(X))
    assert SEEN == [False, False]


def test_a_graph_that_dynamo_did_not_make_has_no_break() -> None:
    assert not ends_in_graph_break(fx.symbolic_trace(Model()))
