"""A convolution's two gradients, one after the other.

Autograd has one operator for both: what the convolution read, the gradient of its output and both results are alive at once.  The
gradient of the input is the transposed convolution of the output's gradient, by definition, and needs no more than the weight.  So
the operator keeps the gradients of weight and bias, and a convolution behind it makes that of the input: by then what the
convolution read is dead.  oneDNN and cuDNN run one kernel for each gradient anyway, and the same ones for these convolutions.

What stays one operator: sizes that are symbols, and convolutions that torch's own kernels compute, which share work between the
gradients or have no fast counterpart: those that `_runs_in_library` refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from compile_remat._torch import conv_layout, joint_graph
from compile_remat._torch.codegen_rules import RulesOf, inductor_rules

aten = torch.ops.aten

MASK = 10
"""Position of the operator's three flags: gradients of input, weight and bias."""

LIBRARY_DTYPES = frozenset({torch.float32, torch.bfloat16})
"""What oneDNN computes in training, and cuDNN beside float16; in float64 torch's own kernels share work between the gradients."""


def split_convolution_gradients(joint: joint_graph.Joint) -> int:
    """Make the gradient of each convolution's input a convolution of its own, behind the gradients of weight and bias.

    Args:
        joint: A joint graph, whose backward is rewritten in place.

    Returns:
        How many were split.
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
    return done


def lay_gradients_out_once(
    backward: fx.GraphModule, forward: fx.GraphModule | None = None, rules: RulesOf = inductor_rules
) -> int:
    """Give convolutions that read one gradient one tensor with its channels innermost; Inductor would copy it for each of them.

    All that reads the gradient reads that tensor: what is computed for one reader alone is written once, where it stands.  Where
    the gradient lies like that already, Inductor makes nothing of the operator that is put behind it.

    Args:
        backward: A backward graph, or one with its forward in it; rewritten in place.
        forward: Its forward, whose convolutions say what layout they have.

    Returns:
        Of how many gradients.
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
    return done


def read_by_both(nodes: Iterable[fx.Node], rules: RulesOf) -> dict[fx.Node, list[fx.Node]]:
    """Gradients that both of a convolution's operators read, with these: what `lay_gradients_out_once` is about.

    Args:
        nodes: The backward's.
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
    """Whether oneDNN or cuDNN compute a convolution's gradients; on GPUs torch's own kernels compute those of depthwise ones."""
    operands: tuple[Any, ...] = node.args
    value, read, groups = operands[0].meta["val"], operands[1].meta["val"], operands[9]
    if value.device.type == "cpu":
        is_there = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
        return is_there and value.dtype in LIBRARY_DTYPES
    return value.dtype in LIBRARY_DTYPES | {torch.float16} and not 1 < groups == read.shape[1]


def _put_behind(joint: joint_graph.Joint, node: fx.Node, item: fx.Node, output_padding: list[int]) -> None:
    """A convolution behind the node's other results, in place of its first one."""
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
    """What makes the transposed convolution as large as the input was, by dimension; None where a size is not a number.

    A convolution with stride `s` gives several input sizes the same output size; the padding, below `s`, tells them apart.
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
