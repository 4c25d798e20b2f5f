"""Inductor's layout of convolutions: channels_last where `InductorRules.has_channels_last` is True.

On CPUs it is True with oneDNN and Inductor's layout optimization, on GPUs in graphs whose convolutions gain by it (`with_layout`).

If True, the inputs and outputs of convolutions have channels-last strides.  Kernels write values of the graph in this order.
Inputs of the graph, such as weights, are copied at the start of the forward, and the backward reads the copies.

Imports nothing of compile_remat but its siblings.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import fx

from compile_remat._torch import sizes
from compile_remat._torch.codegen_rules import InductorRules, RulesOf, inductor_rules
from compile_remat._torch.version import private_module, private_name


def with_layout(rules: RulesOf, joint: fx.GraphModule, backward: Collection[fx.Node]) -> RulesOf:
    """Returns the rules for one joint graph: on devices other than CPUs, the layout depends on the forward's convolutions.

    Args:
        backward: The joint graph's nodes that depend on a tangent.
    """
    if not joint.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        return rules
    forward = [node for node in joint.graph.nodes if node not in backward]
    has_layout = _decide(SimpleNamespace(graph=SimpleNamespace(nodes=forward)))

    def of(device_type: str) -> InductorRules:
        found = rules(device_type)
        return found if device_type == "cpu" else replace(found, has_channels_last=has_layout)

    return of


def _decide(forward: object) -> bool:
    graph_lowering = private_name("torch._inductor.graph", "GraphLowering")
    return bool(graph_lowering.decide_layout_opt(forward, is_inference=False))


def is_copied(value: object, rules: RulesOf = inductor_rules) -> bool:
    """Returns whether Inductor copies this (fake) input of a convolution into another order of dimensions."""
    if not isinstance(value, torch.Tensor) or not is_channels_last(value, rules):
        return False
    return _order(value, sizes.hint_strides(value)) != _order(value, convolution_strides(value, rules))


def is_channels_last(value: object, rules: RulesOf = inductor_rules) -> bool:
    """Returns whether Inductor gives channels-last strides to this tensor, which a convolution reads or writes."""
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    return rules(value.device.type).has_channels_last


def convolution_strides(value: torch.Tensor, rules: RulesOf = inductor_rules) -> tuple[int, ...]:
    """Returns the strides, in elements, in which a convolution reads or writes this tensor.

    A slice of a contiguous tensor's channels gets the channels-last strides of the whole tensor.  A slice of a channels-last
    tensor's rows keeps the batch stride of the whole tensor.
    """
    strides = sizes.hint_strides(value)
    if not is_channels_last(value, rules):
        return strides
    _, channels, height, width = sizes.hint_shape(value)
    if strides[1:] == (height * width, width, 1):
        channels = max(channels, strides[0] // (height * width))
    picture = channels * height * width
    if strides[1:] == (1, width * channels, channels):
        picture = max(picture, strides[0])
    return picture, 1, width * channels, channels


def add_channels_last(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Insert a node, at the graph's insertion point, that returns the tensor of `node` in channels-last strides.

    Inductor emits no kernel for the new node if the tensor has these strides already, or has no other reader.
    """
    private_module("torch._inductor.inductor_prims")  # registers the operator
    value = node.meta["val"]
    _, channels, height, width = value.shape
    strides = (channels * height * width, 1, width * channels, channels)
    target = torch.ops.prims.inductor_force_stride_order.default
    made = graph.call_function(target, (node, list(strides)))
    made.meta = {**node.meta, "val": value.new_empty_strided(value.shape, strides)}
    return made


def _order(value: torch.Tensor, strides: tuple[int, ...]) -> list[int]:
    """Returns the dimensions of size above 1, from the outermost to the innermost."""
    shape = sizes.hint_shape(value)
    return sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
