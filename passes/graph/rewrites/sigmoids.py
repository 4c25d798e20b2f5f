"""``1 / (1 + exp(-x))`` is a sigmoid where something else reads the denominator.

Before 2.13, torch writes the derivative of SiLU with such a quotient, and SiLU itself is ``x / (1 + exp(-x))``: without common
subexpressions, one denominator has two readers.  An exponential that two read is a node of its own for Inductor, so one kernel
computes it and both gradients of a gated MLP, and can write over nothing that both of them read.  With a sigmoid, as later
versions of torch write it, these are two kernels, each in place.  Inductor's C++ computes a sigmoid by the same expression.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def separate_sigmoids(module: fx.GraphModule) -> int:
    """Make sigmoids of quotients whose denominator has other readers.

    Args:
        module: A joint graph without common subexpressions; rewritten in place.

    Returns:
        How many were made.
    """
    made = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.reciprocal.default):
        source = _logit(node.args[0])
        if source is not None and len(node.args[0].users) > 1 and _is_alike(source, node):
            node.target, node.args = aten.sigmoid.default, (source,)
            made += 1
    if made:
        module.recompile()
    return made


def _logit(denominator: fx.Node) -> fx.Node | None:
    """The `x` of ``exp(-x) + 1``."""
    if denominator.args[1:] != (1,) or denominator.kwargs:
        return None
    found: object = denominator
    for target in (aten.add.Tensor, aten.exp.default, aten.neg.default):
        if not isinstance(found, fx.Node) or found.target is not target:
            return None
        found = found.args[0]
    return found if isinstance(found, fx.Node) else None


def _is_alike(source: fx.Node, node: fx.Node) -> bool:
    """Whether both are of one type: the negative of an integer is no logit."""
    given, made = source.meta.get("val"), node.meta.get("val")
    return isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor) and given.dtype == made.dtype
