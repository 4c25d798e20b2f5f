"""Sigmoids: ``1 / (1 + exp(-x))`` becomes a sigmoid if another node reads the denominator.

Before 2.13, torch writes the derivative of SiLU with such a quotient, and SiLU itself is ``x / (1 + exp(-x))``: after CSE, one
denominator has two readers.  Inductor materialises an exponential with two readers, so one kernel computes it and both gradients
of a gated MLP, and cannot reuse in place a buffer that both gradients read.  With a sigmoid, as later versions of torch write it,
Inductor makes two kernels, each with in-place reuse.  Inductor's C++ computes a sigmoid by the same expression.
"""

from __future__ import annotations

import torch
from torch import fx

from compile_remat.passes.graph.rewrites.contract import Rewritten

aten = torch.ops.aten


def separate_sigmoids(module: fx.GraphModule) -> Rewritten:
    """Turn quotients whose denominator has other readers into sigmoids.

    Args:
        module: A joint graph after CSE; rewritten in place.

    Returns:
        The number of new sigmoids.
    """
    made = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.reciprocal.default):
        source = _logit(node.args[0])
        if source is not None and len(node.args[0].users) > 1 and _is_alike(source, node):
            node.target, node.args = aten.sigmoid.default, (source,)
            made += 1
    if made:
        module.recompile()
    return Rewritten(made)


def _logit(denominator: fx.Node) -> fx.Node | None:
    """The `x` of ``exp(-x) + 1``; None for any other expression."""
    if denominator.args[1:] != (1,) or denominator.kwargs:
        return None
    found: object = denominator
    for target in (aten.add.Tensor, aten.exp.default, aten.neg.default):
        if not isinstance(found, fx.Node) or found.target is not target:
            return None
        found = found.args[0]
    return found if isinstance(found, fx.Node) else None


def _is_alike(source: fx.Node, node: fx.Node) -> bool:
    """Returns whether both tensors have the same dtype: an integer `x` gives a quotient of another dtype."""
    given, made = source.meta.get("val"), node.meta.get("val")
    return isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor) and given.dtype == made.dtype
