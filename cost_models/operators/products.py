"""The lengths of a product, which together with its number of operations decide its speed.

Every heavy operator is priced as `batch` products of an m x k by a k x n matrix:

* matrix products as they are, those of several batches with the batch apart;
* grouped products (of experts) as one product for each group, all equally long, because the real lengths depend on data;
* a convolution as the product that it is lowered to: m output pixels, n output channels of a group, k input channels of a
  group times the size of the kernel; its backward, which is two products, by the lengths of the forward; a transposed
  convolution, such as the gradient of an input, by the lengths of the convolution whose gradient it is;
* attention: a product for each head of each sample, m queries, n keys, k the width of a head.

Kernels of causal attention skip the blocks of keys that no query of a block attends to; `visible_part` is the part left.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from compile_remat._torch.sizes import hint_int
from compile_remat.cost_models.operators.kinds import HEAVY_KINDS, OpKind

Product = tuple[int, int, int, int]
"""Batch, m, n and k: `batch` products of an m x k by a k x n matrix."""

_BIAS_FIRST = frozenset({"aten.addmm", "aten.baddbmm", "aten.addbmm", "aten.addmv", "aten._addmm_activation"})
_GROUPED = frozenset({"aten._grouped_mm", "aten._scaled_grouped_mm"})
_GRADIENT_FIRST = frozenset({"aten.convolution_backward", "aten.convolution_backward_overrideable"})

CAUSAL_POSITION = {
    "aten._scaled_dot_product_flash_attention": 4,
    "aten._scaled_dot_product_flash_attention_for_cpu": 4,
    "aten._scaled_dot_product_efficient_attention": 6,
    "aten._scaled_dot_product_cudnn_attention": 6,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten._scaled_dot_product_flash_attention_backward": 11,
    "aten._scaled_dot_product_efficient_attention_backward": 11,
    "aten._scaled_dot_product_cudnn_attention_backward": 14,
}
"""Position of the argument ``is_causal`` of attention operators."""

CAUSAL_BLOCK = 128
"""Keys in a block of a causal kernel on GPUs: of the order of flash attention's blocks."""

CAUSAL_BLOCK_ON_CPU = 512
"""Keys in a block of torch's CPU kernel: 256 causal queries were measured to take as long as 256 queries without a mask."""


def visible_part(packet: str, node: fx.Node, product: Product | None) -> float:
    """Part of all pairs of a query and a key that the kernel computes: about half for long causal attention."""
    position = CAUSAL_POSITION.get(packet)
    if position is None or product is None:
        return 1.0
    is_causal = node.args[position] if len(node.args) > position else node.kwargs.get("is_causal", False)
    block = CAUSAL_BLOCK_ON_CPU if "for_cpu" in packet else CAUSAL_BLOCK
    return min(1.0, (1 + block / max(1, product[2])) / 2) if is_causal is True else 1.0


def product_of(packet: str, kind: OpKind, node: fx.Node, value: Any) -> Product | None:
    """Lengths of a heavy operator's product, from the shapes in its meta; None for other operators or if shapes are missing."""
    if kind not in HEAVY_KINDS:
        return None
    shapes = [shape for argument in node.args if (shape := _shape(argument)) is not None]
    if packet in _GROUPED:
        return _of_groups(shapes, value)
    if kind is OpKind.MATMUL:
        return _of_matmul(shapes[1:] if packet in _BIAS_FIRST else shapes, packet)
    if kind is OpKind.CONV:
        return _of_convolution(shapes, node, value, is_backward=packet in _GRADIENT_FIRST)
    # The first argument of the backward is the gradient of the result, which is as long as the queries.
    return _of_attention(shapes[1:] if "backward" in packet else shapes)


def _of_matmul(shapes: list[tuple[int, ...]], packet: str) -> Product | None:
    if len(shapes) < 2 or not shapes[0] or not shapes[1]:
        return None
    left, right = shapes[0], shapes[1]
    if packet == "aten.linear":
        return 1, prod(left[:-1]), right[0], left[-1]
    k = left[-1]
    if len(right) == 1:
        return 1, prod(left[:-1]), 1, k
    if len(left) == 1:
        return 1, 1, right[-1], k
    if len(right) == 2:
        return 1, prod(left[:-1]), right[-1], k
    return prod(left[:-2]), left[-2], right[-1], k


def _of_groups(shapes: list[tuple[int, ...]], value: Any) -> Product | None:
    """Lengths of one group's product: rows, columns or, if neither operand has groups, the summed dimension are split evenly."""
    output = _shape_of(value)
    if len(shapes) < 2 or output is None or {len(shapes[0]), len(shapes[1]), len(output)} - {2, 3}:
        return None
    left, right = shapes[0], shapes[1]
    m, n, k = left[-2], right[-1], left[-1]
    if len(left) == len(right) == 3:
        return left[0], m, n, k
    if len(right) == 3:
        return right[0], _share(m, right[0]), n, k
    if len(left) == 3:
        return left[0], m, _share(n, left[0]), k
    return (output[0], m, n, _share(k, output[0])) if len(output) == 3 else None


def _share(length: int, groups: int) -> int:
    return max(1, length // max(1, groups))


def _of_convolution(shapes: list[tuple[int, ...]], node: fx.Node, value: Any, *, is_backward: bool) -> Product | None:
    if len(shapes) < (3 if is_backward else 2):
        return None
    output = shapes[0] if is_backward else _shape_of(value[0] if isinstance(value, list | tuple) else value)
    image, weight = (shapes[1], shapes[2]) if is_backward else (shapes[0], shapes[1])
    if output is None or len(output) < 3 or len(weight) < 3:
        return None
    if _is_transposed(node, is_backward=is_backward):
        output, image = image, output
    groups = max(1, image[1] // max(1, weight[1]))
    return groups, output[0] * prod(output[2:]), max(1, output[1] // groups), prod(weight[1:])


def _is_transposed(node: fx.Node, *, is_backward: bool) -> bool:
    position = 7 if is_backward else 6
    return len(node.args) > position and node.args[position] is True


def _of_attention(shapes: list[tuple[int, ...]]) -> Product | None:
    if len(shapes) < 2 or len(shapes[0]) < 3 or len(shapes[1]) < 3:
        return None
    queries, keys = shapes[0], shapes[1]
    return prod(queries[:-2]), queries[-2], keys[-2], queries[-1]


def _shape(argument: Any) -> tuple[int, ...] | None:
    return _shape_of(argument.meta.get("val")) if isinstance(argument, fx.Node) else None


def _shape_of(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, torch.Tensor):
        return None
    return tuple([size if type(size) is int else hint_int(size) for size in value.shape])
