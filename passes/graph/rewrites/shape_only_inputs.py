"""Shape-only operands: an operator that reads only the size of a tensor gets a constant of that size instead.

A pooling's backward takes the pooling's input and reads only its size and dtype (``avg_pool2d_backward`` and
``max_pool2d_with_indices_backward`` in Inductor's lowerings and in ATen): a partition would save or recompute the input for
nothing.  The rewrite passes a constant in its place, which Inductor never writes to memory.
"""

from __future__ import annotations

from collections.abc import MutableSet
from math import ceil, prod
from typing import Any

import torch
from torch import fx

from compile_remat._torch.codegen_rules import RulesOf, inductor_rules
from compile_remat.passes.graph.rewrites.contract import Rewritten

aten = torch.ops.aten

POOLINGS = {
    aten.avg_pool2d_backward.default: None,
    aten.max_pool2d_with_indices_backward.default: 5,
}
"""Operators that read only the size of their second argument, with the position of their dilation; None if they have none."""


def replace_shape_only_inputs(
    module: fx.GraphModule, unclaimed: MutableSet[fx.Node], rules: RulesOf = inductor_rules
) -> Rewritten:
    """Give the backwards of poolings a constant of the size of the pooling's input.

    Args:
        module: A joint graph; rewritten in place.  Inputs with symbolic sizes are not replaced.
        unclaimed: Nodes that neither forward nor backward has to compute; the constants are added.
        rules: Inductor's rules for a type of device: Inductor calls ATen's kernel for a pooling whose elements lie in too many
            windows, and would write the constant to memory for that kernel.

    Returns:
        The number of inputs that were replaced.
    """
    done = 0
    for node in [n for n in module.graph.nodes if n.target in POOLINGS]:
        source = node.args[1]
        value = source.meta.get("val")
        if (
            source.target is aten.full.default
            or not isinstance(value, torch.Tensor)
            or not _is_known(value, node, rules)
        ):
            continue
        with module.graph.inserting_before(node):
            constant = module.graph.call_function(
                aten.full.default,
                (list(value.shape), 0),
                {"dtype": value.dtype, "device": value.device, "pin_memory": False},
            )
        constant.meta["val"] = value.new_zeros(value.shape)
        node.args = (node.args[0], constant, *node.args[2:])
        unclaimed.add(constant)
        done += 1
    if done:
        module.recompile()
    return Rewritten(done)


def _is_known(value: torch.Tensor, node: fx.Node, rules: RulesOf) -> bool:
    """Returns whether all sizes are plain numbers and Inductor generates the kernel itself."""
    if not all(type(size) is int for size in value.shape):
        return False
    kernel, stride = _pair(node.args[2]), _pair(node.args[3] if len(node.args) > 3 else ()) or _pair(node.args[2])
    place = POOLINGS[node.target]  # type: ignore[index]
    dilation = _pair(node.args[place]) if place is not None and len(node.args) > place else ()
    windows = prod(ceil(k / s) for k, s in zip(kernel, stride, strict=True))
    return windows <= rules(value.device.type).max_pooling_window and all(d == 1 for d in dilation)


def _pair(sizes: Any) -> tuple[int, ...]:
    """Sizes in both dimensions, from a pair, one number for both, or an empty sequence for none."""
    numbers = tuple(sizes) if isinstance(sizes, list | tuple) else (sizes,)
    return numbers * 2 if len(numbers) == 1 else numbers
