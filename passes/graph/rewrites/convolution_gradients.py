"""The gradients of a convolution's input and weight, computed one after the other.

Autograd computes both by one operator: the convolution's input, the gradient of its output and both results are alive at once.  The
gradient of the input is the transposed convolution of the output's gradient, by definition, and needs only the weight besides.  So
the operator keeps the gradients of weight and bias, and a convolution after it computes the gradient of the input, when the
convolution's input is dead.  oneDNN and cuDNN run one kernel for each gradient anyway, and the same kernels for these convolutions.

Two cases are not split: sizes that are symbols, and convolutions for which `_runs_in_library` is False.  For the latter torch has
its own kernels, which share work between the gradients or have no fast counterpart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from compile_remat._torch import conv_layout, joint_graph
from compile_remat._torch.codegen_rules import RulesOf, inductor_rules
from compile_remat.passes.graph.rewrites.contract import Rewritten

aten = torch.ops.aten

MASK = 10
"""Position of the operator's three flags: gradients of input, weight and bias."""

LIBRARY_DTYPES = frozenset({torch.float32, torch.bfloat16})
"""Dtypes of oneDNN in training, and of cuDNN beside float16; in float64 torch's own kernels share work between the gradients."""


def split_convolution_gradients(joint: joint_graph.Joint) -> Rewritten:
    """Compute the gradient of each convolution's input by a convolution of its own, after the gradients of weight and bias.

    Args:
        joint: A joint graph, whose backward is rewritten in place.

    Returns:
        The number of convolutions that were split.
    """
    module, done = joint.module, 0
    for node in module.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
        if node not in joint.info.tangents_closure or 0 not in items or not _runs_in_library(node):
            continue
        padding = _output_padding(node)
        if padding is None:
            continue
        _put_behind(joint, node, items.pop(0), padding)
        if items:
            node.args = (*node.args[:MASK], [False, *node.args[MASK][1:]])
            node.meta["val"] = (None, *node.meta["val"][1:])
        else:
            module.graph.erase_node(node)
        done += 1
    if done:
        module.recompile()
    return Rewritten(done)


def lay_gradients_out_once(
    backward: fx.GraphModule, forward: fx.GraphModule | None = None, rules: RulesOf = inductor_rules
) -> Rewritten:
    """Convert each gradient that both operators of a split convolution read to channels-last; Inductor would copy it for each.

    All readers of the gradient then read the converted tensor, which is written to memory once, where the gradient is computed.  If
    the gradient is channels-last already, Inductor drops the conversion.

    Args:
        backward: A backward graph, or one with its forward in it; rewritten in place.
        forward: The forward of `backward`, whose convolutions decide their layout; None if `backward` contains it.
        rules: Inductor's rules for a type of device.

    Returns:
        The number of converted gradients.
    """
    done = 0
    rules_of = conv_layout.with_layout(rules, forward or backward, ())
    for gradient, convolutions in read_by_both(backward.graph.nodes, rules_of).items():
        place = gradient.next if gradient.op == "call_function" else convolutions[0]
        with backward.graph.inserting_before(place):
            laid_out = conv_layout.add_channels_last(backward.graph, gradient)
        for user in [u for u in gradient.users if u is not laid_out and u.op != "output"]:
            user.replace_input_with(gradient, laid_out)
        done += 1
    if done:
        backward.recompile()
    return Rewritten(done)


def read_by_both(nodes: Iterable[fx.Node], rules: RulesOf) -> dict[fx.Node, list[fx.Node]]:
    """Gradients that both gradient operators of a split convolution read, with these operators, for `lay_gradients_out_once`.

    Args:
        nodes: Nodes of the backward.
        rules: Inductor's rules for a type of device.
    """
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node.target in (aten.convolution.default, aten.convolution_backward.default):
            operands: tuple[Any, ...] = node.args
            readers.setdefault(operands[0], []).append(node)
    return {gradient: found for gradient, found in readers.items() if _are_both(gradient.meta.get("val"), found, rules)}


def _are_both(value: Any, convolutions: list[fx.Node], rules: RulesOf) -> bool:
    is_laid_out = conv_layout.is_channels_last(value, rules) and _are_numbers(value.shape)
    return is_laid_out and len({convolution.target for convolution in convolutions}) == 2


def _runs_in_library(node: fx.Node) -> bool:
    """Returns whether oneDNN or cuDNN computes a convolution's gradients; for depthwise ones on GPUs torch's own kernels do."""
    operands: tuple[Any, ...] = node.args
    value, read, groups = operands[0].meta["val"], operands[1].meta["val"], operands[9]
    if value.device.type == "cpu":
        is_there = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
        return is_there and value.dtype in LIBRARY_DTYPES
    return value.dtype in LIBRARY_DTYPES | {torch.float16} and not 1 < groups == read.shape[1]


def _put_behind(joint: joint_graph.Joint, node: fx.Node, item: fx.Node, output_padding: list[int]) -> None:
    """Compute the gradient of the input by a convolution after the node's other results, in place of its first result `item`."""
    gradient, _, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    last = node
    while last.next in node.users:
        last = last.next
    arguments = (gradient, weight, None, stride, padding, dilation, not transposed, output_padding, groups)
    with joint.module.graph.inserting_after(last):
        convolution = joint.module.graph.call_function(aten.convolution.default, arguments)
    convolution.meta = {**node.meta, "val": item.meta["val"]}
    joint.info.tangents_closure.add(convolution)
    joint.info.required_bw_nodes.add(convolution)
    item.replace_all_uses_with(convolution)
    joint.module.graph.erase_node(item)


def _output_padding(node: fx.Node) -> list[int] | None:
    """Output padding, by dimension, with which the transposed convolution has the input's size; None if a size is a symbol.

    A convolution with stride `s` gives several input sizes the same output size; the padding, below `s`, tells them apart.
    None also if no valid padding exists.
    """
    operands: tuple[Any, ...] = node.args
    gradient, read, weight, _, stride, padding, dilation, transposed, *_ = operands
    shapes = [each.meta["val"].shape for each in (gradient, read, weight)]
    sizes = [tuple(shape[2:]) for shape in shapes]
    given = [tuple(each) * (len(sizes[0]) if len(each) == 1 else 1) for each in (stride, padding, dilation)]
    if not all(map(_are_numbers, [*shapes, *given])):
        return None
    found = []
    for out, wanted, kernel, step, pad, spread in zip(*sizes, *given, strict=True):
        reach = spread * (kernel - 1) + 1
        made = (out + 2 * pad - reach) // step + 1 if transposed else (out - 1) * step - 2 * pad + reach
        rest = wanted - made
        if not 0 <= rest < (1 if transposed else max(step, spread)):
            return None
        found.append(rest)
    return found


def _are_numbers(sizes: Iterable[Any]) -> bool:
    return all(type(size) is int for size in sizes)
