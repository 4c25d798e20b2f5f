"""Additions that become one kernel with a matmul."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compile_remat.passes.graph.rewrites.addmm import becoming_addmm

X = torch.ones(8, 8)


def found(function: Callable[..., Tensor], *more: Tensor) -> list[str]:
    """Names of the additions, in a graph of `function` of three squares and `more`."""
    graph: fx.Graph = make_fx(function, tracing_mode="fake")(X, X, X, *more).graph
    nodes = becoming_addmm(graph.nodes)
    return [node.name for node in graph.nodes if node in nodes]


def test_a_product_that_is_added_at_once() -> None:
    assert found(lambda a, b, c: c.sin() + (a @ b)) == ["add"]
    assert found(lambda a, b, c: (a @ b) + c) == ["add"]
    assert found(lambda a, b, c: (a @ b) + c[0]) == ["add"]


def test_a_row_of_gradients_is_summed_up_one_by_one() -> None:
    def row(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        total = (a @ b) + (b @ c)  # the first product is far from the addition, the second is not
        for _ in range(3):
            total = total + (a @ c)
        return total

    assert found(row) == ["add", "add_1", "add_2", "add_3"]


def on_a_gpu(function: Callable[..., Tensor]) -> list[str]:
    """The same in a graph of fake tensors on a GPU."""
    with FakeTensorMode():
        graph = make_fx(function)(*[torch.empty(8, 8, device="cuda") for _ in range(3)]).graph
    nodes = becoming_addmm(graph.nodes)
    return [node.name for node in graph.nodes if node in nodes]


def test_on_a_gpu_what_pointwise_kernels_alone_read_stays() -> None:
    def summed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        total = (a @ b) + (b @ c)
        return (total + (a @ c)).t().sin()

    assert found(summed) == ["add", "add_1"]
    assert on_a_gpu(summed) == []
    assert on_a_gpu(lambda a, b, c: ((a @ b) + (b @ c) + (a @ c)) @ a) == ["add", "add_1"]


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: (a @ b).sin() + c,
        lambda a, b, c: torch.add(c, a @ b, alpha=2),
        lambda a, b, c: (m := a @ b) + m,
        lambda a, b, c: (m := a @ b) + c + m.sin(),
        lambda a, b, c: (m := a @ b, n := b @ c, m + a + n.sin())[2],
        lambda a, b, c: (a[:1] @ b) + c,
        lambda a, b, c: (a @ b) + 1.0,
    ],
    ids=["not the product", "scaled", "with itself", "read twice", "far", "spread product", "a number"],
)
def test_additions_that_stay(function: Callable[..., Tensor]) -> None:
    assert found(function) == []
