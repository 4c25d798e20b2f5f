"""Selections: rows that a loss does not use are dropped before the product that makes rows wide.

Shifted labels take a slice of the logits: ``logits[:, :-1]``.  In the joint graph the slice stands after the product, and its
gradient is padded with zeros before the gradients' products.  The rewrite slices the product's narrow operand instead, and pads
the narrow gradient with zeros: then the logits have only the rows of the loss, and no wide tensor is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compile_remat._torch.operators import call
from compile_remat.passes.graph.slices.row_rules import NotByRows, is_reshape, packet_of, shape_of
from compile_remat.passes.graph.views import fake_mode_of

aten = torch.ops.aten

UNARY = frozenset({"prims.convert_element_type", "aten.clone", "aten.alias", "aten._to_copy"})
"""Operators with one operand before which a slice may be moved."""


def select_rows_first(module: fx.GraphModule) -> int:
    """Move slices of products' rows to the products' operands, and padding of gradients to after their products, in place.

    Returns:
        The number of slices and paddings that were moved.
    """
    moved = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not node.users:
            continue
        if packet_of(node) == "aten.slice":
            moved += _slice_first(module.graph, node)
        elif packet_of(node) == "aten.slice_scatter":
            moved += _pad_last(module.graph, node)
    if moved:
        module.graph.eliminate_dead_code()
        module.recompile()
    return moved


# -- slices -----------------------------------------------------------------------------------------------------------


def _slice_first(graph: fx.Graph, node: fx.Node) -> bool:
    """Move a slice in front of `UNARY` operators and a product, if no other node reads a result in between; True if moved."""
    try:
        chain, view, product = _way_up(node)
        bounds = _bounds(node)
    except (NotByRows, _Elsewhere):
        return False
    sizes, (dim, *_) = shape_of(view), bounds
    if dim >= len(sizes) - 1:
        return False
    factor, weight = product.args[:2]
    assert isinstance(factor, fx.Node) and isinstance(weight, fx.Node)
    with fake_mode_of(factor.meta["val"]), graph.inserting_before(product):
        rows = _selected(graph, factor, sizes[:-1], bounds)
        wide = _like(call(graph, aten.mm.default, (rows, weight)), product)
        new = _like(call(graph, aten.view.default, (wide, [*_cut(sizes[:-1], bounds), sizes[-1]])), view)
        for old in reversed(chain):
            new = _like(call(graph, old.target, (new, *old.args[1:]), old.kwargs), old)
    node.replace_all_uses_with(new)
    return True


class _Elsewhere(Exception):
    """A node in between has other readers, or is none that a slice can be moved across."""


def _way_up(node: fx.Node) -> tuple[list[fx.Node], fx.Node, fx.Node]:
    """The `UNARY` operators above a slice, the view above these, and the product that is viewed."""
    chain, above = list[fx.Node](), node.all_input_nodes[0]
    while packet_of(above) in UNARY and len(above.users) == 1:
        chain.append(above)
        above = above.all_input_nodes[0]
    if not is_reshape(above) or len(above.users) > 1:
        raise _Elsewhere
    product = above.all_input_nodes[0]
    is_split = shape_of(above)[-1] == shape_of(product)[-1] and len(shape_of(above)) > 2
    if packet_of(product) != "aten.mm" or len(product.users) > 1 or not is_split:
        raise _Elsewhere
    return chain, above, product


Bounds = tuple[int, int, int, int]
"""Dimension, begin, end and step of a slice."""


def _bounds(node: fx.Node, position: int = 1) -> Bounds:
    sizes = shape_of(node if position == 2 else node.all_input_nodes[0])
    given: Sequence[Any] = [*node.args[position:], *[None] * 4]
    dim = (given[0] or 0) % len(sizes)
    begin, end, step = slice(given[1], given[2], given[3]).indices(sizes[dim])
    return dim, begin, end, step


def _cut(sizes: Sequence[int], bounds: Bounds) -> list[int]:
    dim, *steps = bounds
    return [len(range(*steps)) if d == dim else size for d, size in enumerate(sizes)]


def _selected(
    graph: fx.Graph, factor: fx.Node, rows: Sequence[int], bounds: Bounds, is_turned: bool = False
) -> fx.Node:
    """The rows of a product's narrow operand that a slice of the wide result takes.

    Args:
        is_turned: True if the operand is transposed, so that its columns are the rows.
    """
    (dim, *steps), number = bounds, math.prod(_cut(rows, bounds))
    width = shape_of(factor)[0 if is_turned else 1]
    split, small = ([width, *rows], [width, number]) if is_turned else ([*rows, width], [number, width])
    view = _like(call(graph, aten.view.default, (factor, split)), factor)
    part = _like(call(graph, aten.slice.Tensor, (view, dim + is_turned, *steps)), factor)
    copy = _like(call(graph, aten.clone.default, (part,), {"memory_format": torch.contiguous_format}), factor)
    return _like(call(graph, aten.view.default, (copy, small)), factor)


def _like(node: fx.Node, other: fx.Node) -> fx.Node:
    """Copy the meta of `other`, its value and tags apart, to a new node; returns the new node."""
    node.meta = {k: v for k, v in other.meta.items() if k not in ("val", "tensor_meta", "recompute")} | node.meta
    return node


# -- paddings ---------------------------------------------------------------------------------------------------------


def _pad_last(graph: fx.Graph, node: fx.Node) -> bool:
    """Apply the zero padding of a gradient after the products that read it instead of before; True if moved."""
    zeros, gradient = node.args[:2]
    assert isinstance(zeros, fx.Node) and isinstance(gradient, fx.Node)
    if packet_of(zeros) != "aten.full" or zeros.args[1] != 0:
        return False
    try:
        chain, flat, products = _way_down(node)
        bounds = _bounds(node, 2)
    except (NotByRows, _Elsewhere):
        return False
    sizes, dim = shape_of(node), bounds[0]
    if dim >= len(sizes) - 1:
        return False
    with fake_mode_of(node.meta["val"]):
        with graph.inserting_before(chain[0] if chain else flat):
            small = gradient
            for old in chain:
                small = _like(call(graph, old.target, (small, *old.args[1:]), old.kwargs), old)
            small = _like(
                call(graph, aten.reshape.default, (small, [math.prod(_cut(sizes[:-1], bounds)), sizes[-1]])), flat
            )
        for product in products:
            with graph.inserting_before(product):
                _product_of(graph, product, flat, small, sizes, bounds)
    return True


def _way_down(node: fx.Node) -> tuple[list[fx.Node], fx.Node, list[fx.Node]]:
    """The `UNARY` operators below a padding, the view that merges the rows, and the products that read this view."""
    chain, below = list[fx.Node](), node
    while True:
        users = list(below.users)
        if len(users) != 1:
            raise _Elsewhere
        (below,) = users
        if below.op != "call_function" or packet_of(below) not in UNARY:
            break
        chain.append(below)
    if below.op != "call_function" or not is_reshape(below) or len(shape_of(below)) != 2:
        raise _Elsewhere
    if shape_of(below)[-1] != shape_of(node)[-1]:
        raise _Elsewhere
    products = list[fx.Node]()
    for user in below.users:
        is_turned = user.op == "call_function" and packet_of(user) == "aten.permute"
        readers = list(user.users) if is_turned else [user]
        if not all(r.op == "call_function" and packet_of(r) == "aten.mm" for r in readers):
            raise _Elsewhere
        if not all(
            (r.args[0] is user or (r.args[0] is below) or (r.args[1] is below and not is_turned)) for r in readers
        ):
            raise _Elsewhere
        if any(len({*r.args[:2]} & {below, user}) != 1 for r in readers):
            raise _Elsewhere
        products += readers
    return chain, below, products


def _product_of(
    graph: fx.Graph, product: fx.Node, flat: fx.Node, small: fx.Node, sizes: tuple[int, ...], bounds: Bounds
) -> None:
    """Replace a product by one on the unpadded gradient `small`; an input's gradient is padded afterwards, a weight's is not."""
    first, second = product.args
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    if first is flat:
        narrow = _like(call(graph, aten.mm.default, (small, second)), product)
        width = shape_of(narrow)[-1]
        part = _like(call(graph, aten.view.default, (narrow, [*_cut(sizes[:-1], bounds), width])), product)
        value = part.meta["val"]
        zeros = call(
            graph, aten.full.default, ([*sizes[:-1], width], 0), {"dtype": value.dtype, "device": value.device}
        )
        padded = _like(call(graph, aten.slice_scatter.default, (_like(zeros, product), part, *bounds)), product)
        new = _like(call(graph, aten.view.default, (padded, list(shape_of(product)))), product)
    elif second is flat:
        rows = _selected(graph, first, sizes[:-1], bounds, is_turned=True)
        new = _like(call(graph, aten.mm.default, (rows, small)), product)
    else:
        turned = _like(call(graph, aten.permute.default, (small, [1, 0])), first)
        rows = _selected(graph, second, sizes[:-1], bounds)
        new = _like(call(graph, aten.mm.default, (turned, rows)), product)
    product.replace_all_uses_with(new)
