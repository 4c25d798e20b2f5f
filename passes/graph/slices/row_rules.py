"""Row rules: which dimensions of an operator's operands are which dimensions of its result.

A row is an index that runs through a tensor, such as a token or a sample.  An operator keeps rows apart if each row of its result
is computed from the same row of its operands.  `dims_of` knows this of the operators in its table and of pointwise ones.  All
others, random operators among them, count as mixing rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from compile_remat.cost_models import OpKind, op_kind


class Rows(NamedTuple):
    """The dimensions of a tensor's rows: `length` dimensions from `start` on; the product of their sizes is the number of rows."""

    start: int
    length: int

    @property
    def dims(self) -> range:
        """The dimensions."""
        return range(self.start, self.start + self.length)


class NotByRows(Exception):
    """Rows cannot be computed in slices; the text gives the reason, for users."""


Dims = tuple[int | None, ...]
"""For each dimension of an operand, the dimension of the result that it is; None if the operator mixes elements along it."""

SUMMING = frozenset({"aten.sum", "aten.mm", "aten.bmm"})
"""Operators that mix elements by adding them: the sums of slices can be added one after the other."""

CONSTANTS = frozenset({"aten.full", "aten.scalar_tensor"})


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The static sizes of a node's tensor, or of its first output.

    Raises:
        NotByRows: The node is no tensor, or a size is a symbol.
    """
    value = node.meta.get("val")
    value = value[0] if isinstance(value, list | tuple) and value else value
    if not isinstance(value, torch.Tensor):
        raise NotByRows(f"{node.name} is no tensor")
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        raise NotByRows(f"sizes of {node.name} are dynamic")
    return tuple(value.shape)


def passes_on(node: fx.Node, source: fx.Node, rows: Rows) -> Rows | None:
    """The dimensions of the result that hold the rows of operand `source`; None if the operator adds the rows up.

    Raises:
        NotByRows: The operator mixes rows, or is not known.
    """
    if is_reshape(node):
        return _reshaped(shape_of(source), rows, shape_of(node), node)
    if packet_of(node) in ("aten.mm", "aten.bmm") and len(node.all_input_nodes) == 1:
        raise NotByRows(f"{_named(node)} multiplies {source.name} by itself")
    for operand, dims in dims_of(node):
        if operand is source:
            places = [dims[d] for d in rows.dims]
            if all(place is None for place in places) and packet_of(node) in SUMMING:
                return None
            found = _group(places, rows.length)
            if found is not None and _sizes(node, found) == _sizes(source, rows):
                return found
    raise NotByRows(f"{_named(node)} needs all rows of {source.name} at once")


def needs(node: fx.Node, rows: Rows) -> dict[fx.Node, Rows | None]:
    """For each operand, the dimensions that hold the rows of the result; None if every row needs the whole operand.

    Raises:
        NotByRows: The operator mixes rows, or is not known.
    """
    if is_reshape(node):
        source = node.all_input_nodes[0]
        return {source: _reshaped(shape_of(node), rows, shape_of(source), node)}
    found: dict[fx.Node, Rows | None] = {}
    for operand, dims in dims_of(node):
        sizes = shape_of(operand)
        places = [dims.index(d) if d in dims and sizes[dims.index(d)] == shape_of(node)[d] else None for d in rows.dims]
        shown = [place for place in places if place is not None and sizes[place] != 1]
        group = _group(places, rows.length)
        if group is None and shown:
            raise NotByRows(f"{_named(node)} repeats {operand.name} along a part of the rows")
        if operand in found and found[operand] != group:
            raise NotByRows(f"{_named(node)} reads {operand.name} twice, by row and as a whole")
        found[operand] = group if shown or math.prod(_sizes(node, rows)) == 1 else None
    return found


def summed(node: fx.Node) -> dict[fx.Node, Rows]:
    """For each operand of a product that adds rows up, the dimension that it sums over; empty for other operators."""
    if packet_of(node) == "aten.mm":
        first, second = node.all_input_nodes
        return {first: Rows(1, 1), second: Rows(0, 1)}
    if packet_of(node) == "aten.bmm":
        first, second = node.all_input_nodes
        return {first: Rows(2, 1), second: Rows(1, 1)}
    return {}


def packet_of(node: fx.Node) -> str:
    """The operator without its overload, such as ``aten.mm``."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(node.target, "__name__", str(node.target))


def is_reshape(node: fx.Node) -> bool:
    """Returns whether a node is a view, reshape or ``_unsafe_view``: the same elements in the same order, in other sizes."""
    return packet_of(node) in ("aten.view", "aten.reshape", "aten._unsafe_view")


def dims_of(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    """Each operand of a node with the dimensions of the result that its own dimensions are.

    Raises:
        NotByRows: The operator is not known.
    """
    packet = packet_of(node)
    rule = _RULES.get(packet)
    if rule is None and op_kind(node) is OpKind.POINTWISE and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _broadcast
    if rule is None or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise NotByRows(f"{_named(node)} is not known to keep rows apart")
    return rule(node)


def _named(node: fx.Node) -> str:
    return f"{packet_of(node).removeprefix('aten.')} ({node.name})"


def _sizes(node: fx.Node, rows: Rows) -> tuple[int, ...]:
    return shape_of(node)[rows.start : rows.start + rows.length]


def _group(places: list[int | None], count: int) -> Rows | None:
    """`places` as rows if they are `count` consecutive dimensions; else None."""
    first = places[0] if places else None
    if first is None or places != list(range(first, first + count)):
        return None
    return Rows(first, count)


def _reshaped(old: tuple[int, ...], rows: Rows, new: tuple[int, ...], node: fx.Node) -> Rows:
    """The dimensions of the rows after a reshape from `old` to `new` sizes; the fewest that fit."""
    before, number = math.prod(old[: rows.start]), math.prod(old[rows.start : rows.start + rows.length])
    for count in range(1, len(new) + 1):
        for start in range(len(new) - count + 1):
            if math.prod(new[:start]) == before and math.prod(new[start : start + count]) == number:
                return Rows(start, count)
    raise NotByRows(f"{_named(node)} puts rows together with something else")


# -- operators --------------------------------------------------------------------------------------------------------


def _broadcast(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    last = len(shape_of(node))
    return [(x, tuple(range(last - len(shape_of(x)), last))) for x in _tensors(node)]


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor | list | tuple)]


def _same_but(position: int) -> Callable[[fx.Node], list[tuple[fx.Node, Dims]]]:
    """The rule of operators that mix elements along the dimensions in argument `position` and keep all others."""

    def rule(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
        last = len(shape_of(node))
        given: Any = node.args[position] if len(node.args) > position else 0
        along = {d % last for d in (given if isinstance(given, list | tuple) else [given])}
        for operand in _tensors(node):
            if len(shape_of(operand)) != last:
                raise NotByRows(f"{_named(node)} has operands of other sizes")
        return [(x, tuple(None if d in along else d for d in range(last))) for x in _tensors(node)]

    return rule


def _gather(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    source, dim, index = node.args[:3]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    last = len(shape_of(node))
    every = tuple(range(last))
    return [(source, tuple(None if d == dim % last else d for d in every)), (index, every)]


def _reduction(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    source = node.all_input_nodes[0]
    reduced, keeps, last = reduced_dims(node), _keeps(node), len(shape_of(source))
    kept = [d for d in range(last) if keeps or d not in reduced]
    return [(source, tuple(None if d in reduced else kept.index(d) for d in range(last)))]


def reduced_dims(node: fx.Node) -> list[int]:
    """The dimensions of its operand over which a node reduces, ascending; all of them if it names none."""
    last = len(shape_of(node.all_input_nodes[0]))
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return sorted(d % last for d in dims) or list(range(last))


def _keeps(node: fx.Node) -> bool:
    given = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    return bool(given)


def _product(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    (first, second), batch = _factors(node), len(shape_of(node)) - 2
    every = tuple(range(batch))
    found: list[tuple[fx.Node, Dims]] = [(first, (*every, batch, None)), (second, (*every, None, batch + 1))]
    if packet_of(node) == "aten.addmm":
        bias = node.args[0]
        assert isinstance(bias, fx.Node)
        found.append((bias, tuple(range(2 - len(shape_of(bias)), 2))))
    return found


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    first, second = node.args[1:3] if packet_of(node) == "aten.addmm" else node.args[:2]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return first, second


def _permute(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    order: Any = node.args[1]
    last = len(order)
    places = [d % last for d in order]
    return [(node.all_input_nodes[0], tuple(places.index(d) for d in range(last)))]


def _unsqueeze(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    dim: Any = node.args[1]
    last = len(shape_of(node))
    return [(node.all_input_nodes[0], tuple(d for d in range(last) if d != dim % last))]


def _squeeze(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    source = node.all_input_nodes[0]
    sizes, given = shape_of(source), node.args[1] if len(node.args) > 1 else list(range(len(shape_of(source))))
    dims = given if isinstance(given, list | tuple) else [given]
    gone = {int(str(d)) % len(sizes) for d in dims}
    gone = {d for d in gone if sizes[d] == 1}
    kept = [d for d in range(len(sizes)) if d not in gone]
    return [(source, tuple(kept.index(d) if d in kept else None for d in range(len(sizes))))]


def _item(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    return [(node.all_input_nodes[0], tuple(range(len(shape_of(node)))))]


def _constant(node: fx.Node) -> list[tuple[fx.Node, Dims]]:
    return []


_RULES: dict[str, Callable[[fx.Node], list[tuple[fx.Node, Dims]]]] = {
    **dict.fromkeys(("prims.convert_element_type", "aten.where", "aten.clone", "aten.expand"), _broadcast),
    **dict.fromkeys(("aten.alias", "aten.detach", "aten._to_copy", "aten.full_like"), _broadcast),
    **dict.fromkeys(("aten.gelu", "aten.gelu_backward"), _broadcast),
    **dict.fromkeys(("aten.sum", "aten.amax", "aten.amin", "aten.var_mean", "aten.mean"), _reduction),
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten.addmm"), _product),
    **dict.fromkeys(("aten._log_softmax", "aten._softmax", "aten.slice", "aten.scatter"), _same_but(1)),
    **dict.fromkeys(
        ("aten._log_softmax_backward_data", "aten._softmax_backward_data", "aten.slice_scatter"), _same_but(2)
    ),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes"), _same_but(2)),
    "aten.cat": _same_but(1),
    "aten.gather": _gather,
    "aten.permute": _permute,
    "aten.unsqueeze": _unsqueeze,
    "aten.squeeze": _squeeze,
    "getitem": _item,
    **dict.fromkeys(CONSTANTS, _constant),
}
