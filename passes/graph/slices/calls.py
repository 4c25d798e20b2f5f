"""The operator that stands for a region computed in slices of rows: one graph, called once for each slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def run_slices(
    body: fx.GraphModule,
    rest: fx.GraphModule | None,
    rows: int,
    slice_rows: int,
    sliced_dims: tuple[int, ...],
    joined_dims: tuple[int, ...],
    *operands: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Call `body` for each slice of rows.

    Args:
        body: Takes the operands of one slice, then a token for each sum; returns the outputs to be joined, then parts of the sums.
        rest: The body for the last slice, if that has fewer rows; else None.
        rows: Number of all rows.
        slice_rows: Number of rows of one slice.
        sliced_dims: For each operand the dimension of its rows, or -1 if every slice takes the whole operand.
        joined_dims: For each joined output the dimension of its rows.
        operands: The tensors from which slices are taken.

    Returns:
        The joined outputs, then the sums.
    """
    tokens = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in sum_values(body, len(operands))]
    sums, joined = list[torch.Tensor](), [list[torch.Tensor]() for _ in joined_dims]
    for start in range(0, rows, slice_rows):
        length = min(slice_rows, rows - start)
        graph = body if length == slice_rows or rest is None else rest
        given = [x if dim < 0 else x.narrow(dim, start, length) for x, dim in zip(operands, sliced_dims, strict=True)]
        made = graph(*given, *tokens)
        for parts, part in zip(joined, made[: len(joined)], strict=True):
            parts.append(part)
        parts = made[len(joined) :]
        if not sums:
            sums = [part.to(token.dtype) for part, token in zip(parts, tokens, strict=True)]
        else:
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return (*(torch.cat(parts, dim) for parts, dim in zip(joined, joined_dims, strict=True)), *sums)


def sum_values(body: fx.GraphModule, operands: int) -> list[Any]:
    """The fake tokens, one element in the dtype of each sum, that a body takes after its operands and does not read."""
    return [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")[operands:]]


def is_sliced(node: fx.Node) -> bool:
    """Returns whether a node is a sliced call."""
    return node.target is run_slices


def slices_of(node: fx.Node) -> int:
    """The number of slices that a sliced call computes."""
    rows: Any = node.args[2]
    length: Any = node.args[3]
    return int(-(-rows // length))


def sums_of(node: fx.Node) -> list[Any]:
    """The fake tensors of the sums that a sliced call returns behind its joined outputs."""
    joined: Any = node.args[5]
    return list(node.meta["val"][len(joined) :])
