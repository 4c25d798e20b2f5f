"""Layers whose backward reads masks and indices, as `narrow` looks for: dropout, signs, maxima, sorted values, pooling windows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.fuzz.builder import Builder, void
from tests.fuzz.instructions import unary
from tests.fuzz.kinds import ALONG_INDICES, POOLING

ELEMENTWISE = ("dropout", "dropout", "dropout", "dropout", "relu", "leaky_relu", "clamp", "masked_fill", "where")


def maskable(b: Builder) -> None:
    """A layer of the newest values, most often dropout behind a function whose gradient needs its input."""
    if b.chance(6):
        return _pooled(b)
    if b.chance(4):
        return _along(b)
    x = b.pick(_is_large(b))
    if x is None:
        return unary(b)
    if b.chance(2) and b[x].dim() > 1 and b[x].shape[-1] > 1:
        x = b.emit("linear", [x, b.weight((b[x].shape[-1],) * 2, x)])[0]
    kind = b.choose(ELEMENTWISE)
    if kind in ("masked_fill", "where"):
        return void(b.emit(kind, [x, b.pick(lambda t: t.shape == b[x].shape) or x]))
    (y,) = b.emit(b.choose(("gelu", "tanh", "silu", "sin")), [x])
    return void(b.emit(kind, [y]))


def _is_large(b: Builder) -> Callable[[torch.Tensor], bool]:
    """As large as any register: small values have no narrow form."""
    fitting = [b[r.name].numel() for r in b.registers if b[r.name].numel() <= b.sizes.largest]
    largest = max(fitting, default=0)
    return lambda t: t.numel() == largest > 0


def _along(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() > 0 and 1 < t.numel() <= b.sizes.largest)
    if x is None:
        return unary(b)
    return void(b.emit(b.choose(list(ALONG_INDICES)), [x], [b.choose(range(-1, b[x].dim() - 1))]))


def _pooled(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() == 4 and min(t.shape[-2:]) > 1 and t.numel() <= b.sizes.largest)
    if x is None:
        x = b.input(b.sizes.image, role="differentiable")
    return void(b.emit(b.choose(list(POOLING)), [x]))
