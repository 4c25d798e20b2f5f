"""Factors: the one number through which the incoming gradients reach a region's gradients, which are then multiples of it.

A backward is linear in its tangents.  If all that a region's gradients read of the tangents is one number, such as the gradient of
a mean loss over its count, the gradients for 1 can be computed before that number is known.  Rules prove it, operator by operator:
code of a user's own backward may clip, round or compare what comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.cost_models import is_view
from compile_remat.passes.graph.slices.bodies import Loop
from compile_remat.passes.graph.slices.row_rules import NotByRows, is_reshape, packet_of

PRODUCTS = frozenset({"aten.mm", "aten.bmm"})

WIDE = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which the gradient of a sum neither underflows nor overflows; float16 is scaled by its users against that."""


@dataclass(frozen=True)
class Factor:
    """One number of a joint graph of which all gradients of a loop are multiples.

    Attributes:
        node: The number; it depends on the tangents.
        chain: The nodes from the number to the loop, in the graph's order; the loop reads some of them, or the number itself.
        results: The loop's results that are multiples.
    """

    node: fx.Node
    chain: tuple[fx.Node, ...]
    results: frozenset[fx.Node]


def factor_of(joint: joint_graph.Joint, loop: Loop) -> Factor:
    """Returns the first number through which the tangents reach the loop.

    Behind it the loop computes as the whole graph does: where all labels are ignored, the loss over their count of 0 stays a
    gradient of 0, and does not become 0 times infinity.

    Raises:
        NotByRows: There is none, or a gradient is no multiple of it, or would underflow in float16.
    """
    late: Collection[fx.Node] = joint.info.tangents_closure
    inside = [node for node in loop.nodes if node in late]
    results = frozenset(node for node in (*loop.joined, *loop.sums) if node in late)
    if not results:
        raise NotByRows("no gradient is computed in slices")
    entries = [node for node in loop.operands if node in late]
    node, chain = _first_number(joint.module.graph, entries, late)
    dependent = {node, *chain, *inside}
    for each in (*chain, *inside):
        _check(each, dependent, is_inside=each not in chain)
    _check_dtype(node)
    return Factor(node, chain, results)


def scaled(insert: Callable[..., fx.Node], gradient: fx.Node, factor: fx.Node) -> fx.Node:
    """Multiply a gradient for 1 by the factor, a bfloat16 one in float32; `insert` adds a call to the graph."""
    dtype, convert = gradient.meta["val"].dtype, torch.ops.prims.convert_element_type.default
    wide = insert(convert, gradient, torch.float32) if dtype is torch.bfloat16 else gradient
    made = insert(torch.ops.aten.mul.Tensor, wide, factor)
    return made if made.meta["val"].dtype is dtype else insert(convert, made, dtype)


def _first_number(
    graph: fx.Graph, entries: Sequence[fx.Node], late: Collection[fx.Node]
) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The first number through which all ways from tangents to `entries` lead, with the nodes behind it.

    Raises:
        NotByRows: There is none.
    """
    above = _ancestors(entries, late, None)
    ordered = [node for node in graph.nodes if node in above]
    for node in filter(_is_number, ordered):
        behind = _ancestors(entries, late, node)
        if not any(x.op == "placeholder" for x in behind - {node}):
            return node, tuple(x for x in ordered if x in behind and x is not node)
    raise NotByRows("the incoming gradient is not one number")


def _ancestors(entries: Sequence[fx.Node], late: Collection[fx.Node], end: fx.Node | None) -> set[fx.Node]:
    """The nodes among `late` from which `entries` are computed, these included; no way goes on above `end`."""
    found, pending = set[fx.Node](), list(entries)
    while pending:
        node = pending.pop()
        if node in found or node not in late:
            continue
        found.add(node)
        if node is not end:
            pending += node.all_input_nodes
    return found


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype.is_floating_point


# -- multiples --------------------------------------------------------------------------------------------------------


def _check(node: fx.Node, dependent: Collection[fx.Node], *, is_inside: bool) -> None:
    """Check that a node is a multiple of the factor if its operands among `dependent` are.

    Raises:
        NotByRows: It is not, or would be computed twice, or is of a dtype that is too small.
    """
    packet = packet_of(node)
    rule = _RULES.get(packet) or (_of_first if is_view(node) or is_reshape(node) else None)
    if rule is None or not rule(node, dependent) or not (is_inside or packet not in PRODUCTS):
        raise NotByRows(f"{packet.removeprefix('aten.')} ({node.name}) may not be a multiple of the incoming gradient")
    _check_dtype(node)


def _check_dtype(node: fx.Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype not in WIDE:
        name = str(value.dtype).removeprefix("torch.")
        raise NotByRows(f"{node.name} is of {name}, in which gradients for 1 may underflow")


def _of_first(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    """Linear in the first operand alone; a view has the dtype of its operand, or it is another number."""
    if is_reshape(node) and not isinstance(node.args[1], list | tuple):
        return False
    first, others = node.args[0], [*node.args[1:], *node.kwargs.values()]
    return first in dependent and not any(x in dependent for x in _nodes(others))


def _of_one(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    """Linear in each of two operands, of which one is a multiple."""
    return sum(x in dependent for x in node.args[:2] if isinstance(x, fx.Node)) == 1


def _of_quotient(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    return node.kwargs.get("rounding_mode") is None and _of_first(node, dependent)


def _of_all(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    """Linear in two operands together."""
    return all(_is_multiple(x, dependent) for x in node.args[:2])


def _of_branches(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    return node.args[0] not in dependent and all(_is_multiple(x, dependent) for x in node.args[1:3])


def _of_parts(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    parts: Any = node.args[0]
    return all(_is_multiple(x, dependent) for x in parts)


def _of_inserted(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    """Linear in what is inserted and in what it is inserted into; positions are the same for all."""
    places = [x for x in node.args if isinstance(x, fx.Node)]
    given = [node.args[0], node.args[3] if packet_of(node) == "aten.scatter" else node.args[1]]
    others = [x for x in places if x not in given]
    return (
        not node.kwargs and all(_is_multiple(x, dependent) for x in given) and not any(x in dependent for x in others)
    )


def _is_multiple(operand: Any, dependent: Collection[fx.Node]) -> bool:
    return operand in dependent if isinstance(operand, fx.Node) and operand in dependent else _is_zero(operand)


def _is_zero(operand: Any) -> bool:
    """Returns whether an operand is the number 0, or a tensor of zeros."""
    if not isinstance(operand, fx.Node):
        return isinstance(operand, int | float) and operand == 0
    while operand.op == "call_function" and (packet_of(operand) in _KEEPING_ZEROS or is_reshape(operand)):
        (operand,) = operand.all_input_nodes
    if operand.op != "call_function":
        return False
    packet = packet_of(operand)
    position = {"aten.full": 1, "aten.full_like": 1, "aten.scalar_tensor": 0}.get(packet)
    return position is not None and _is_zero(operand.args[position])


def _nodes(arguments: Sequence[Any]) -> list[fx.Node]:
    found = list[fx.Node]()
    fx.map_arg(list(arguments), found.append)
    return found


_KEEPING_ZEROS = frozenset({"aten.expand", "prims.convert_element_type", "aten.clone", "aten.alias", "aten.permute"})

_RULES: dict[str, Callable[[fx.Node, Collection[fx.Node]], bool]] = {
    **dict.fromkeys(
        ("prims.convert_element_type", "aten._to_copy", "aten.clone", "aten.alias", "aten.detach"), _of_first
    ),
    **dict.fromkeys(("aten.neg", "aten.sum", "aten.mean", "aten.expand", "aten.permute", "aten.gather"), _of_first),
    **dict.fromkeys(("aten.unsqueeze", "aten.squeeze", "aten.slice", "aten.select", "getitem"), _of_first),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes"), _of_first),
    **dict.fromkeys(("aten._log_softmax_backward_data", "aten._softmax_backward_data"), _of_first),
    **dict.fromkeys(("aten.gelu_backward", "aten.silu_backward", "aten.threshold_backward"), _of_first),
    **dict.fromkeys(("aten.tanh_backward", "aten.sigmoid_backward"), _of_first),
    **dict.fromkeys(("aten.mul", "aten.mm", "aten.bmm"), _of_one),
    **dict.fromkeys(("aten.add", "aten.sub"), _of_all),
    **dict.fromkeys(("aten.scatter", "aten.slice_scatter"), _of_inserted),
    "aten.div": _of_quotient,
    "aten.where": _of_branches,
    "aten.cat": _of_parts,
}
