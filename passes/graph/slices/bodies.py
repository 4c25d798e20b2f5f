"""Bodies: the graph of one slice has the operators of a region on fewer rows, with the rows of each tensor in one dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_remat._torch.operators import call
from compile_remat.passes.graph.slices.row_rules import Rows, is_reshape, packet_of, reduced_dims, shape_of
from compile_remat.passes.graph.views import fake_mode_of

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Loop:
    """The nodes that one sliced call computes.

    Attributes:
        nodes: The nodes, in the graph's order.
        operands: Inputs of the nodes from outside the loop, with the dimensions of their rows; None if every slice reads all of it.
        joined: Nodes whose rows are read outside the loop; their slices are concatenated.
        sums: Nodes that add rows up.
        places: Dimensions of the rows of each node and operand.
    """

    nodes: tuple[fx.Node, ...]
    operands: Mapping[fx.Node, Rows | None]
    joined: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    places: Mapping[fx.Node, Rows]


def body_of(loop: Loop, given: Sequence[fx.Node], rows: int) -> fx.GraphModule:
    """The graph of a slice of `rows` rows.

    Its inputs are the slices of the operands, then one element of each sum so far, which it does not read: they order its calls.
    Its outputs are the joined nodes, then what is to be added to the sums.

    Args:
        given: One node for each of the loop's operands, with its rows in one dimension.
    """
    mode = next(fake_mode_of(n.meta["val"]) for n in given if isinstance(n.meta["val"], torch.Tensor))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    with mode:
        for k, ((operand, place), source) in enumerate(zip(loop.operands.items(), given, strict=True)):
            value = source.meta["val"]
            value = value if place is None else value.narrow(place.start, 0, rows)
            copies[operand] = _with_value(graph.placeholder(f"operand_{k}"), value)
        for k, node in enumerate(loop.sums):
            token = torch.empty(1, dtype=sum_dtype(node), device=node.meta["val"].device)
            _with_value(graph.placeholder(f"sum_{k}"), token)
        for node in loop.nodes:
            copies[node] = _Copy(node, loop, copies, rows).into(graph)
    graph.output(tuple(copies[node] for node in (*loop.joined, *loop.sums)))
    return fx.GraphModule({}, graph)


def sum_dtype(node: fx.Node) -> torch.dtype:
    """The dtype in which slices of a sum are added: float32 for bfloat16 and float16, else the node's own."""
    dtype: torch.dtype = node.meta["val"].dtype
    return torch.float32 if dtype in HALVES else dtype


def addition_of(total: torch.Tensor, part: torch.Tensor) -> fx.GraphModule:
    """The graph that adds one slice's part to a sum; the arguments are fake tensors."""
    graph = fx.Graph()
    with fake_mode_of(total):
        given = [_with_value(graph.placeholder(name), value) for name, value in (("total", total), ("part", part))]
        graph.output((added(lambda target, *args: call(graph, target, args), *given),))
    return fx.GraphModule({}, graph)


def added(insert: Callable[..., fx.Node], total: fx.Node, part: fx.Node) -> fx.Node:
    """Add a slice's part to a sum, in the sum's dtype; `insert` adds a call to the graph."""
    return insert(torch.ops.aten.add.Tensor, total, converted(insert, part, total.meta["val"].dtype))


def converted(insert: Callable[..., fx.Node], part: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Convert a node to a dtype, if it has another one; `insert` adds a call to the graph."""
    has_it = part.meta["val"].dtype is dtype
    return part if has_it else insert(torch.ops.prims.convert_element_type.default, part, dtype)


def _with_value(node: fx.Node, value: Any) -> fx.Node:
    node.meta["val"] = value
    return node


class _Copy:
    """Copies one node of the joint graph into a body."""

    def __init__(self, node: fx.Node, loop: Loop, copies: Mapping[fx.Node, fx.Node], rows: int) -> None:
        self.node, self.loop, self.copies, self.rows = node, loop, copies, rows
        self.place = loop.places.get(node)

    def into(self, graph: fx.Graph) -> fx.Node:
        """Append the copy to `graph`, with sizes and dimension arguments changed for the slice's rows."""
        args, kwargs = self._arguments(graph)
        copy = call(graph, self.node.target, args, kwargs)
        for name in ("nn_module_stack", "stack_trace", "original_aten"):
            if name in self.node.meta:
                copy.meta[name] = self.node.meta[name]
        return copy

    def _arguments(self, graph: fx.Graph) -> tuple[tuple[Any, ...], dict[str, Any]]:
        packet, args = packet_of(self.node), list(self.node.args)
        if is_reshape(self.node) or packet == "aten.expand":
            args[1] = self._sizes()
        elif packet == "aten.full":
            args[0] = self._sizes()
        elif packet == "aten.permute":
            args[1] = self._order()
        elif packet in _DIM_ARGUMENT:
            self._set_dims(args, _DIM_ARGUMENT[packet])
        elif packet in ("aten.sum", "aten.amax", "aten.amin", "aten.mean", "aten.var_mean"):
            self._set_reduced(args)
        if is_reshape(self.node):  # the result of a slice may have other strides
            return (self.copies[self.node.all_input_nodes[0]], args[1]), {}
        known: Any = fx.map_arg((tuple(args), self.node.kwargs), lambda n: self._operand(graph, n))
        return known[0], dict(known[1])

    def _operand(self, graph: fx.Graph, operand: fx.Node) -> fx.Node:
        """The copy of an operand; if all rows share the operand, several dimensions of rows become one of size 1."""
        copy = self.copies[operand]
        if self.place is None or self.place.length == 1 or operand in self.loop.places:
            return copy
        sizes, last = shape_of(operand), len(shape_of(self.node))
        shown = [d for d in self.place.dims if d - (last - len(sizes)) >= 0]
        if len(shown) < 2 or packet_of(self.node) in _DIM_ARGUMENT:
            return copy
        start = shown[0] - (last - len(sizes))
        shape = [*sizes[:start], 1, *sizes[start + len(shown) :]]
        return call(graph, torch.ops.aten.view.default, (copy, shape))

    def _sizes(self) -> list[int]:
        sizes = list(shape_of(self.node))
        if self.place is None:
            return sizes
        return [*sizes[: self.place.start], self.rows, *sizes[self.place.start + self.place.length :]]

    def _order(self) -> list[int]:
        source = self.node.all_input_nodes[0]
        order: Any = self.node.args[1]
        last, place = len(order), self.loop.places.get(source)
        inner = place.dims[1:] if place is not None else range(0)
        return [_collapsed(d % last, place) for d in order if d % last not in inner]

    def _set_dims(self, args: list[Any], position: int) -> None:
        if len(args) <= position:
            return
        unsqueezes = packet_of(self.node) == "aten.unsqueeze"
        reference = self.node if unsqueezes else self._reference()
        place, last = self.loop.places.get(reference), len(shape_of(reference))
        given = args[position]
        if isinstance(given, list | tuple):
            args[position] = [_collapsed(d % last, place) for d in given]
        else:
            args[position] = _collapsed(given % last, place)

    def _reference(self) -> fx.Node:
        """The operand to whose dimensions a dimension argument refers."""
        named = [x for x in self.node.all_input_nodes if x in self.loop.places]
        return named[0] if named else self.node.all_input_nodes[0]

    def _set_reduced(self, args: list[Any]) -> None:
        place = self.loop.places.get(self.node.all_input_nodes[0])
        dims = dict.fromkeys(_collapsed(d, place) for d in reduced_dims(self.node))
        if len(args) > 1 or "dim" not in self.node.kwargs:
            args[1:2] = [list(dims)]


_DIM_ARGUMENT = {
    **dict.fromkeys(("aten.gather", "aten.scatter", "aten.unsqueeze", "aten.squeeze", "aten.cat", "aten.slice"), 1),
    **dict.fromkeys(("aten._log_softmax", "aten._softmax"), 1),
    **dict.fromkeys(("aten._log_softmax_backward_data", "aten._softmax_backward_data", "aten.slice_scatter"), 2),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes"), 2),
}
"""Positions of the arguments in which operators take the dimensions that they work along."""


def _collapsed(dim: int, place: Rows | None) -> int:
    """The number of a dimension after the dimensions of the rows are merged into one."""
    if place is None or dim < place.start:
        return dim
    return place.start if dim in place.dims else dim - place.length + 1


def joined_shape(node: fx.Node, place: Rows, rows: int) -> list[int]:
    """The sizes of a node's tensor after the dimensions of its rows are merged into one."""
    sizes = shape_of(node)
    assert math.prod(sizes[place.start : place.start + place.length]) == rows
    return [*sizes[: place.start], rows, *sizes[place.start + place.length :]]
