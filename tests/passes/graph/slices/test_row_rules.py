"""The dimensions of rows: of operators that keep rows apart, and of operators that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compile_remat.passes.graph.slices.row_rules import NotByRows, Rows, needs, passes_on

B, T, D = 2, 3, 5


def last_node(function: Callable[..., Tensor], *arguments: Tensor) -> fx.Node:
    """The operator whose result a function gives, its arguments placeholders."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        graph = make_fx(function, tracing_mode="fake")(*(mode.from_tensor(x) for x in arguments)).graph
    (node,) = graph.output_node().all_input_nodes
    return node


x, row, weight = torch.randn(B, T, D), torch.randn(B, T, 1), torch.randn(D)
flat = x.view(B * T, D)

KEPT = [
    (lambda: last_node(lambda a: a.relu(), x), Rows(0, 2), [Rows(0, 2)]),
    (lambda: last_node(lambda a, b: a + b, x, row), Rows(0, 2), [Rows(0, 2), Rows(0, 2)]),
    (lambda: last_node(lambda a, b: a * b, x, weight), Rows(0, 2), [Rows(0, 2), None]),
    (lambda: last_node(lambda a: a.sum(-1), x), Rows(0, 2), [Rows(0, 2)]),
    (lambda: last_node(lambda a: a.view(B * T, D), x), Rows(0, 1), [Rows(0, 2)]),
    (lambda: last_node(lambda a: a.view(B, T, D), flat), Rows(0, 2), [Rows(0, 1)]),
    (lambda: last_node(lambda a: torch.ops.aten.permute.default(a, [1, 0]), flat), Rows(1, 1), [Rows(0, 1)]),
    (lambda: last_node(lambda a: a.unsqueeze(0), x), Rows(1, 2), [Rows(0, 2)]),
    (lambda: last_node(lambda a, b: torch.mm(a, b), flat, torch.randn(D, 7)), Rows(0, 1), [Rows(0, 1), None]),
    (lambda: last_node(lambda a, b: torch.bmm(a, b), x, torch.randn(B, D, 7)), Rows(1, 1), [Rows(1, 1), None]),
    (lambda: last_node(lambda a: a[..., 1:3], x), Rows(0, 2), [Rows(0, 2)]),
    (lambda: last_node(lambda a: torch.cat([a, a.clone()], -1), x), Rows(0, 2), [Rows(0, 2), Rows(0, 2)]),
]


@pytest.mark.parametrize(("make", "rows", "expected"), KEPT, ids=[f"{k}" for k in range(len(KEPT))])
def test_rows_of_operands(make: Callable[[], fx.Node], rows: Rows, expected: list[Rows | None]) -> None:
    """A row of the result reads these rows of each operand; from an operand's rows, the result's rows follow."""
    node = make()
    found = needs(node, rows)
    assert [found[operand] for operand in node.all_input_nodes] == expected
    for operand, place in found.items():
        if place is not None:
            assert passes_on(node, operand, place) == rows


@pytest.mark.parametrize(
    "make",
    [
        lambda: last_node(lambda a: a.cumsum(0), flat),
        lambda: last_node(lambda a: a.amax(0), flat),
        lambda: last_node(lambda a: a[1:], flat),
        lambda: last_node(lambda a: a.sum((1, 2)), x),
        lambda: last_node(lambda a: torch.cat([a, a.clone()]), flat),
        lambda: last_node(lambda a: torch.softmax(a, 0), flat),
        lambda: last_node(lambda a: torch.ops.aten.view.default(a, [T, B * D]), flat),
        lambda: last_node(lambda a: torch.bernoulli(a), flat.sigmoid()),
        lambda: last_node(lambda a: torch.fft.fft(a).real, flat),
    ],
)
def test_operators_that_mix_rows(make: Callable[[], fx.Node]) -> None:
    node = make()
    source = node.all_input_nodes[0]
    rows = Rows(0, 2 if source.meta["val"].dim() == 3 else 1)
    with pytest.raises(NotByRows, match=node.name):
        passes_on(node, source, rows)


def test_sums_of_rows_can_be_added_up() -> None:
    product = last_node(lambda a, b: torch.mm(a, b), flat.t().contiguous(), torch.randn(B * T, 7))
    first, second = product.all_input_nodes
    assert passes_on(product, first, Rows(1, 1)) is None and passes_on(product, second, Rows(0, 1)) is None
    total = last_node(lambda a: a.sum((0, 1)), x)
    assert passes_on(total, total.all_input_nodes[0], Rows(0, 2)) is None
