"""Layers that make rows wider, as `slices` looks for: heads with their losses, MLPs, and wide products that anything may read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.fuzz.builder import Builder, void
from tests.fuzz.instructions import unary

WIDER = (2, 3, 5, 8)
"""Factors by which a product widens its rows."""


def wide(b: Builder) -> None:
    """A layer of the newest values that have rows."""
    x = b.pick(_has_rows(b))
    if x is None:
        return unary(b)
    width = b[x].shape[-1]
    wider = width * b.choose(WIDER)
    kind = b.choose(("loss_of_head", "linear", "mlp", "gated_mlp", "z_loss_of_head", "linear_bias"))
    if kind == "loss_of_head":
        return _loss(b, x, wider)
    if kind == "z_loss_of_head":
        return void(b.emit(kind, [x, b.weight((width, wider), x)]))
    weights = {
        "linear": ((wider, width),),
        "linear_bias": ((wider, width), (wider,)),
        "mlp": ((wider, width), (width, wider)),
        "gated_mlp": ((wider, width), (wider, width), (width, wider)),
    }
    return void(b.emit(kind, [x, *(b.weight(shape, x) for shape in weights[kind])]))


def _loss(b: Builder, x: str, classes: int) -> None:
    shape = tuple(b[x].shape)
    labels = b.input(shape[:-1], "int64", classes)
    reduction = b.choose(("mean", "sum", "none"))
    ignored = -100 if reduction == "mean" else b.choose((-100, 0))  # the mean of no token is no number
    smoothing = b.choose((0.0, 0.1))
    b.emit("loss_of_head", [x, b.weight((classes, shape[-1]), x), labels], [smoothing, reduction, ignored])


def _has_rows(b: Builder) -> Callable[[torch.Tensor], bool]:
    def fits(t: torch.Tensor) -> bool:
        return t.dim() in (2, 3) and t.shape[-1] > 1 and 1 < t.shape[:-1].numel() and t.numel() <= b.sizes.largest // 2

    return fits
