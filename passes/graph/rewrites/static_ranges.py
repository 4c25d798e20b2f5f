"""Indices whose range follows from the sizes in the graph: those of maxima, of sorting, of pooling windows."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

ALONG_DIMENSION = frozenset(
    {
        aten.max,
        aten.min,
        aten.median,
        aten.nanmedian,
        aten.mode,
        aten.kthvalue,
        aten.sort,
        aten.topk,
        aten.cummax,
        aten.cummin,
    }
)
"""Their second output are positions along one dimension of their first argument."""

IN_WINDOWS = {
    aten.max_pool2d_with_indices: 2,
    aten.max_pool3d_with_indices: 3,
    aten.adaptive_max_pool2d: 2,
    aten.adaptive_max_pool3d: 3,
}
"""Their second output are positions in so many last dimensions of their first argument, counted through."""

NARROW_TYPES = ((1 << 8, torch.uint8), (1 << 15, torch.int16), (1 << 31, torch.int32))
"""Types with the number of indices, from 0 on, that they hold; the smallest first."""


def num_indices(node: fx.Node) -> int | None:
    """How many values an index may have, from 0 on; None where the graph's sizes do not say it."""
    target = getattr(node.target, "overloadpacket", None)
    if target in (aten.argmax, aten.argmin):
        return _along(node)
    if node.target is not operator.getitem or node.args[1] != 1:
        return None
    made = node.args[0]
    assert isinstance(made, fx.Node)
    packet = getattr(made.target, "overloadpacket", None)
    if packet in ALONG_DIMENSION:
        return _along(made)
    if packet in IN_WINDOWS:
        return _static(math.prod(_shape(made)[-IN_WINDOWS[packet] :]))
    return None


def narrow_type(count: int) -> torch.dtype | None:
    """The smallest type that holds 0 to ``count - 1`` in fewer bytes than int64; None where there is none."""
    return next((dtype for most, dtype in NARROW_TYPES if count <= most), None)


def _along(node: fx.Node) -> int | None:
    shape, dim = _shape(node), _given(node, "dim")
    if dim is None:
        return _static(math.prod(shape))
    return _static(shape[dim]) if shape else 1


def _given(node: fx.Node, name: str) -> Any:
    """What an argument of an operator is, by its name."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    for place, argument in enumerate(schema.arguments):
        if argument.name == name:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(name, argument.default_value)
            return given
    return None


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.all_input_nodes[0].meta["val"].shape)


def _static(size: Any) -> int | None:
    return size if isinstance(size, int) else None
