"""Lengths of products, read off traced operators."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from compile_remat.cost_models import Op, OpKind, Roofline, describe, load_device


def products_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[Any]:
    module = make_fx(function, tracing_mode="fake")(*[torch.randn(shape) for shape in shapes])
    return [op.product for op in map(describe, module.graph.nodes) if op.kind in (OpKind.MATMUL, OpKind.CONV)]


@pytest.mark.parametrize(
    ("function", "shapes", "product"),
    [
        (torch.mm, ((3, 5), (5, 7)), (1, 3, 7, 5)),
        (torch.bmm, ((2, 3, 5), (2, 5, 7)), (2, 3, 7, 5)),
        (torch.addmm, ((7,), (3, 5), (5, 7)), (1, 3, 7, 5)),
        (torch.baddbmm, ((2, 3, 7), (2, 3, 5), (2, 5, 7)), (2, 3, 7, 5)),
        (torch.mv, ((3, 5), (5,)), (1, 3, 1, 5)),
        (torch.dot, ((5,), (5,)), (1, 1, 1, 5)),
    ],
)
def test_matrix_products(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], product: tuple[int, ...]
) -> None:
    assert products_of(function, *shapes) == [product]


def test_a_convolution_is_the_product_of_pixels_and_channels() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, stride=2, padding=1)

    assert products_of(run, (2, 6, 8, 8), (10, 6, 3, 3)) == [(1, 2 * 4 * 4, 10, 6 * 9)]


def test_groups_are_products_of_their_own() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, padding=1, groups=3)

    assert products_of(run, (2, 6, 8, 8), (12, 2, 3, 3)) == [(3, 2 * 8 * 8, 4, 2 * 9)]


def test_a_transposed_convolution_has_the_lengths_of_the_one_that_it_is_the_gradient_of() -> None:
    def run(x: Tensor, w: Tensor) -> Any:
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        with torch.enable_grad():
            out = F.conv_transpose2d(*leaves, stride=2, groups=2)
            return torch.autograd.grad(out, leaves, out.detach())

    forward, backward = products_of(run, (2, 10, 4, 4), (10, 3, 3, 3))
    assert backward == forward == (2, 2 * 4 * 4, 5, 3 * 9)


def test_a_backward_has_the_lengths_of_its_forward() -> None:
    def run(x: Tensor, w: Tensor) -> Any:
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        with torch.enable_grad():
            out = F.conv2d(*leaves, padding=1)
            return torch.autograd.grad(out, leaves, out.detach())

    forward, backward = products_of(run, (2, 6, 8, 8), (10, 6, 3, 3))
    assert backward == forward == (1, 2 * 8 * 8, 10, 6 * 9)


def test_attention_is_a_product_for_each_head() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(*leaves)
            return torch.autograd.grad(out, leaves, out.detach())

    shapes = ((2, 3, 16, 8), (2, 3, 32, 8), (2, 3, 32, 8))
    module = make_fx(run, tracing_mode="fake")(*[torch.randn(shape) for shape in shapes])
    ops = [op for op in map(describe, module.graph.nodes) if op.kind is OpKind.ATTENTION]
    assert len(ops) == 2 and "backward" in ops[1].target
    assert [op.product for op in ops] == [(6, 16, 32, 8)] * 2


def test_nothing_else_has_one() -> None:
    module = make_fx(lambda x: x.sum(0).exp(), tracing_mode="fake")(torch.randn(3, 4))
    assert [describe(node).product for node in module.graph.nodes] == [None] * 4


@pytest.mark.parametrize(
    ("is_causal", "length", "part"), [(False, 2048, 1.0), (True, 256, 1.0), (True, 1024, 0.75), (True, 2048, 0.625)]
)
def test_causal_attention_works_on_the_blocks_that_are_seen(is_causal: bool, length: int, part: float) -> None:
    """On CPU, keys come in blocks of 512: queries of 2048 keys see one to four of the four blocks."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
            return torch.autograd.grad(out, leaves, out.detach())

    module = make_fx(run, tracing_mode="fake")(*[torch.randn(1, 1, length, 8)] * 3)
    ops = [op for op in map(describe, module.graph.nodes) if op.kind is OpKind.ATTENTION]
    assert [op.visible for op in ops] == [part] * 2


def test_only_the_part_that_is_seen_is_paid_for() -> None:
    device = replace(load_device("h100-sxm"), half_sizes=(("attention", (0.0, 0.0, 0.0)),))
    figures = ("sdpa", "aten.x.default", OpKind.ATTENTION, "bfloat16", 10**12, 0, 0, False, False, (8, 4096, 4096, 64))
    whole, half = Op(*figures), Op(*figures, visible=0.5)
    model = Roofline(device)
    assert model.arithmetic_time_ns(half) == pytest.approx(model.arithmetic_time_ns(whole) / 2, rel=1e-6)


def test_grouped_products_share_one_length_out_among_the_groups() -> None:
    def run(x: Tensor, w: Tensor) -> Any:
        leaves = [x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()]
        ends = torch.arange(1, 5, dtype=torch.int32) * 16  # 4 groups
        with torch.enable_grad():
            out = F.grouped_mm(*leaves, offs=ends)
            return torch.autograd.grad(out, leaves, out.detach())

    module = make_fx(run, tracing_mode="fake")(torch.randn(64, 32), torch.randn(4, 32, 48))
    ops = [op for op in map(describe, module.graph.nodes) if op.kind is OpKind.MATMUL]
    # forward; gradients of the weights, of which each sums over its group's rows, and of the rows
    assert sorted(op.product for op in ops) == [(4, 16, 32, 48), (4, 16, 48, 32), (4, 32, 48, 16)]  # type: ignore[type-var]
    assert [(op.flops, op.estimated) for op in ops] == [(2 * 64 * 32 * 48, False)] * 3
