"""Draws layers: an instruction with weights of its own, or shared with another."""

from __future__ import annotations

import math

from tests.fuzz.builder import Builder, void
from tests.fuzz.instructions import shapes, unary
from tests.fuzz.kinds import POOLING


def linear(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() > 0 and t.shape[-1] > 0)
    if x is None:
        return unary(b)
    width = b[x].shape[-1]
    kind = b.choose(("linear", "linear_bias", "matmul", "einsum_mix", "bilinear"))
    size = width if kind == "bilinear" else b.choose((width, *b.sizes.widths))
    if kind == "linear_bias":
        return void(b.emit(kind, [x, b.weight((size, width), x), b.weight((size,), x)]))
    return void(b.emit(kind, [x, b.weight((size, width) if kind == "linear" else (width, size), x)]))


def products(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() >= 2 and t.numel() <= b.sizes.largest and t.numel() > 0)
    if x is None:
        return unary(b)
    if b.chance(3):
        return void(b.emit("gram", [x]))
    if b.chance(3):
        other = b.pick(lambda t: t.dim() == b[x].dim() and t.shape[:-1] == b[x].shape[:-1] and t.dtype == b[x].dtype)
        return void(b.emit("einsum_outer", [x, other or x])) if b[x].shape[-1] <= 4 else unary(b)
    other = b.pick(
        lambda t: (
            t.dim() >= 2
            and t.dtype == b[x].dtype
            and t.shape[-2] == b[x].shape[-1]
            and t.dim() in (2, b[x].dim())
            and (t.dim() == 2 or t.shape[:-2] == b[x].shape[:-2])
        )
    )
    return unary(b) if other is None else void(b.emit("matmul", [x, other]))


def attention(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() in (3, 4) and 0 < t.numel() <= b.sizes.largest and t.shape[-1] > 1)
    if x is None:
        return shapes(b)
    like = b[x]

    def source() -> str:
        found = b.pick(lambda t: t.shape == like.shape and t.dtype == like.dtype) or x
        if b.chance(2):
            return found
        return b.emit("linear", [found, b.weight((like.shape[-1], like.shape[-1]), x)])[0]

    qkv = [source(), source(), source()]
    kind = b.choose(("sdpa", "attention", "masked_attention", "sdpa_dropout"))
    return void(b.emit(kind, qkv, [b.chance(2)] if kind == "sdpa" else []))


def convolution(b: Builder) -> None:
    kind = b.choose(("conv2d", "conv1d", "depthwise", "conv_transpose", "avg_pool", "max_pool", "adaptive_pool"))
    kind = b.choose((kind, "upsample", "bilinear_upsample")) if b.chance(4) else kind
    dim = 3 if kind == "conv1d" else 4
    grows = kind in ("conv_transpose", "upsample", "bilinear_upsample")
    x = b.pick(lambda t: t.dim() == dim and 0 < t.numel() <= (b.sizes.largest // 4 if grows else b.sizes.largest))
    if x is None:
        shape = b.sizes.signal if dim == 3 else b.sizes.image
        x = b.input(shape, role="differentiable" if b.chance(2) else "input")
    channels, out = b[x].shape[1], b.choose((2, 3, b[x].shape[1]))
    if kind == "conv1d":
        weights = [b.weight((out, channels, 3), x)]
    elif kind == "conv2d":
        weights = [b.weight((out, channels, 3, 3), x), b.weight((out,), x)]
    elif kind == "depthwise":
        weights = [b.weight((channels, 1, 3, 3), x)]
    elif kind == "conv_transpose":
        weights = [b.weight((channels, out, 2, 2), x)]
    else:
        weights = []
    # Given as a symbol, the number of groups makes `aot_function` fail in torch's own passes (torch 2.13).
    b.emit(kind, [x, *weights], [channels] if kind == "depthwise" else [])


def pooling(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() == 4 and min(t.shape[-2:]) > 1 and t.numel() <= b.sizes.largest)
    if x is None:
        x = b.input(b.sizes.image, role="differentiable")
    return void(b.emit(b.choose(list(POOLING)), [x]))


def norm(b: Builder) -> None:
    kind = b.choose(("layer_norm", "batch_norm", "group_norm", "rms_norm", "batch_norm_eval", "instance_norm"))
    if kind in ("layer_norm", "rms_norm"):
        x = b.pick(lambda t: t.dim() > 0 and t.shape[-1] > 1)
        if x is None:
            return unary(b)
        return void(
            b.emit(kind, [x, *(b.weight((b[x].shape[-1],), x) for _ in range(2 if kind == "layer_norm" else 1))])
        )
    least = 3 if kind in ("instance_norm", "group_norm") else 2
    x = b.pick(lambda t: least <= t.dim() <= 4 and t.numel() > t.shape[1] and math.prod(t.shape[2:]) > (least > 2))
    if x is None:
        return unary(b)
    channels = b[x].shape[1]
    if kind == "instance_norm":
        return void(b.emit(kind, [x]))
    affine = [b.weight((channels,), x), b.weight((channels,), x)]
    if kind == "group_norm":
        return void(b.emit(kind, [x, *affine], [2 if channels % 2 == 0 else 1]))
    if kind == "batch_norm" and "checkpoint" in b.regions:
        return void(b.emit("batch_norm_stateless", [x, *affine]))  # running stats would be updated twice, by torch
    dtype = str(b[x].dtype).removeprefix("torch.")
    mean = b.leaf("buffer", (channels,), dtype)
    stats = [mean, b.leaf("buffer", (channels,), dtype, other_than=mean)]  # torch's decomposition takes them for two
    kind = kind if b.checkpointed.isdisjoint(stats) else "batch_norm_eval"
    return void(b.emit(kind, [x, *stats, *affine]))
