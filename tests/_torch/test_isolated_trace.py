"""Looking at a plan leaves Dynamo as it was: compiled graphs, counts of recompilations, sizes seen."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from compile_remat import explain
from compile_remat._torch.isolated_trace import trace_isolated
from compile_remat.api import look

pytestmark = pytest.mark.usefixtures("fresh")


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.sin(x)) * 2


def broken_in_two(x: torch.Tensor) -> torch.Tensor:
    x = torch.sin(torch.sin(x))
    torch._dynamo.graph_break()
    return torch.cos(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
        self.calls.add_(1)
        return torch.tanh(self.linear(x)) * factor


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


FUNCTIONS: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
    "function": lambda: plain,
    "graph break": lambda: broken_in_two,
    "module": Model,
    "sequential": sequential,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_twenty_looks_leave_the_users_function_compiled(name: str) -> None:
    function, counter = FUNCTIONS[name](), CompileCounter()
    x = torch.randn(4, 8, requires_grad=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        call = torch.compile(function, backend=counter)
        call(x)
        graphs = counter.frame_count
        for rows in range(20):
            assert explain(function, torch.randn(4 + rows, 8, requires_grad=True), memory_budget="min").plan is not None
        call(x)
        assert counter.frame_count == graphs  # still compiled
        call(x.double() if isinstance(function, type(plain)) else x.detach())
        assert counter.frame_count > graphs  # and the limit was not reached


def test_the_sizes_of_a_look_are_not_taken_as_dynamic() -> None:
    shapes: list[list[Any]] = []

    def backend(gm: Any, inputs: Any) -> Any:
        shapes.append([s for x in inputs if isinstance(x, torch.Tensor) for s in x.shape])
        return gm.forward

    explain(plain, torch.randn(3, 8, requires_grad=True))
    explain(plain, torch.randn(5, 8, requires_grad=True))
    torch.compile(plain, backend=backend)(torch.randn(7, 8))
    assert shapes == [[7, 8]]


def test_each_look_traces_anew_and_sees_every_graph() -> None:
    seen: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(gm)
        return gm.forward

    x = torch.randn(3, 8)
    for _ in range(2):
        assert torch.equal(trace_isolated(broken_in_two, backend, [x]), broken_in_two(x))
    assert len(seen) == 4


def test_the_twin_of_a_module_shares_its_tensors_and_hooks() -> None:
    model, seen = Model(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(3, 8)
    out = trace_isolated(model, lambda gm, inputs: gm.forward, [x])
    assert torch.equal(out, model(x)) and float(model.calls) == 2 and seen == [1, 1]
    assert "forward" not in model.__dict__


def test_nothing_of_a_look_stays_alive() -> None:
    graphs: list[weakref.ref[Any]] = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(weakref.ref(gm))
        return gm.forward

    for function in (plain, Model()):
        trace_isolated(function, backend, [torch.randn(3, 8)])
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_module_paths_are_those_of_training() -> None:
    """Values of a torch module are named by their place in it, whatever function calls it."""
    (planned,) = look(sequential(), (torch.randn(4, 8),), memory_budget="max")
    assert {value.origin.module_path for value in planned.problem.values} <= {"", "0", "1"}
