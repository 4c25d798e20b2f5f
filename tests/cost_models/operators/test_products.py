"""Lengths of products, read off traced operators."""

import math
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from compile_remat.cost_models import Op, OpKind, Roofline, describe, load_device


def ops_of(function: Callable[..., Any], *shapes: tuple[int, ...], kinds: Container[OpKind]) -> list[Op]:
    module = make_fx(function, tracing_mode="fake")(*[torch.randn(shape) for shape in shapes])
    return [op for op in map(describe, module.graph.nodes) if op.kind in kinds]


def with_gradients(function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """A function that calls another one and returns the gradients of its inputs."""

    def run(*inputs: Tensor) -> Any:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        with torch.enable_grad():
            out = function(*leaves)
            return torch.autograd.grad(out, leaves, out.detach())

    return run


@pytest.mark.parametrize(
    ("function", "shapes", "product"),
    [
        (torch.mm, ((3, 5), (5, 7)), (1, 3, 7, 5)),
        (torch.bmm, ((2, 3, 5), (2, 5, 7)), (2, 3, 7, 5)),
        (torch.addmm, ((7,), (3, 5), (5, 7)), (1, 3, 7, 5)),
        (torch.baddbmm, ((2, 3, 7), (2, 3, 5), (2, 5, 7)), (2, 3, 7, 5)),
        (torch.mv, ((3, 5), (5,)), (1, 3, 1, 5)),
        (torch.dot, ((5,), (5,)), (1, 1, 1, 5)),
        # Convolutions are products of pixels and channels, and groups are products of their own.
        (partial(F.conv2d, stride=2, padding=1), ((2, 6, 8, 8), (10, 6, 3, 3)), (1, 2 * 4 * 4, 10, 6 * 9)),
        (partial(F.conv2d, padding=1, groups=3), ((2, 6, 8, 8), (12, 2, 3, 3)), (3, 2 * 8 * 8, 4, 2 * 9)),
    ],
)
def test_products(function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], product: tuple[int, ...]) -> None:
    (op,) = ops_of(function, *shapes, kinds=(OpKind.MATMUL, OpKind.CONV))
    assert op.product == product
    assert op.flops == 2 * math.prod(product)


@pytest.mark.parametrize(
    ("function", "shapes", "product"),
    [
        (partial(F.conv2d, padding=1), ((2, 6, 8, 8), (10, 6, 3, 3)), (1, 2 * 8 * 8, 10, 6 * 9)),
        # That of the convolution which it is the gradient of.
        (partial(F.conv_transpose2d, stride=2, groups=2), ((2, 10, 4, 4), (10, 3, 3, 3)), (2, 2 * 4 * 4, 5, 3 * 9)),
        (F.scaled_dot_product_attention, ((2, 3, 16, 8), (2, 3, 32, 8), (2, 3, 32, 8)), (6, 16, 32, 8)),  # of each head
    ],
    ids=["convolution", "transposed convolution", "attention"],
)
def test_a_backward_has_the_lengths_of_its_forward(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], product: tuple[int, ...]
) -> None:
    forward, backward = ops_of(with_gradients(function), *shapes, kinds=(OpKind.CONV, OpKind.ATTENTION))
    assert backward.product == forward.product == product
    assert "backward" in backward.target and "backward" not in forward.target


def test_nothing_else_has_one() -> None:
    assert [op.product for op in ops_of(lambda x: x.sum(0).exp(), (3, 4), kinds=set(OpKind))] == [None] * 4


@pytest.mark.parametrize(
    ("is_causal", "length", "part"), [(False, 2048, 1.0), (True, 256, 1.0), (True, 1024, 0.75), (True, 2048, 0.625)]
)
def test_causal_attention_works_on_the_blocks_that_are_seen(is_causal: bool, length: int, part: float) -> None:
    """On CPU, keys come in blocks of 512: queries of 2048 keys see one to four of the four blocks."""
    attention = with_gradients(partial(F.scaled_dot_product_attention, is_causal=is_causal))
    ops = ops_of(attention, *[(1, 1, length, 8)] * 3, kinds=(OpKind.ATTENTION,))
    assert [op.visible for op in ops] == [part] * 2


def test_only_the_part_that_is_seen_is_paid_for() -> None:
    device = replace(load_device("h100-sxm"), half_sizes=(("attention", (0.0, 0.0, 0.0)),))
    figures = ("sdpa", "aten.x.default", OpKind.ATTENTION, "bfloat16", 10**12, 0, 0, False, False, (8, 4096, 4096, 64))
    whole, half = Op(*figures), Op(*figures, visible=0.5)
    model = Roofline(device)
    assert model.arithmetic_time_ns(half) == pytest.approx(model.arithmetic_time_ns(whole) / 2, rel=1e-6)


def test_grouped_products_share_one_length_out_among_the_groups() -> None:
    def in_four_groups(x: Tensor, w: Tensor) -> Tensor:
        return F.grouped_mm(x, w, offs=torch.arange(1, 5, dtype=torch.int32) * 16)

    grouped = with_gradients(in_four_groups, torch.bfloat16)
    ops = ops_of(grouped, (64, 32), (4, 32, 48), kinds=(OpKind.MATMUL,))
    # forward; gradients of the weights, of which each sums over its group's rows, and of the rows
    assert sorted(op.product for op in ops) == [(4, 16, 32, 48), (4, 16, 48, 32), (4, 32, 48, 16)]  # type: ignore[type-var]
    assert [(op.flops, op.estimated) for op in ops] == [(2 * 64 * 32 * 48, False)] * 3
