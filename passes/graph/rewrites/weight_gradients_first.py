"""Gradients of weights are computed before gradients of inputs.

For a product `y = x @ w` autograd computes first the gradient of `x`, then the gradient of `w`.  Until then `x` is alive beside
its gradient: for an MLP, two tensors of its hidden size at once.  In the other order `x` dies before its gradient is computed.
At the later of the two products all four tensors are alive in autograd's order, and never more than three in the new order, so
the new order is never worse.  The kernels stay the same.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from compile_remat.cost_models import OpKind, op_kind
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.graph.views import CASTS, root_of

aten = torch.ops.aten

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})

SUMS = frozenset({aten.add.Tensor})


def move_weight_gradients_up(module: fx.GraphModule, backward: Collection[fx.Node]) -> Rewritten:
    """Move each product on which only outputs depend in front of the first product that reads the same gradient.

    Args:
        module: A joint graph; its nodes are moved in place.
        backward: Nodes of `module` that depend on a tangent.

    Returns:
        The number of products that were moved.
    """
    products = [n for n in module.graph.nodes if n.target in PRODUCTS and n in backward]
    firsts: dict[fx.Node, fx.Node] = {}  # by gradient, its first reading product that was not moved
    moved = 0
    for product in products:
        gradients = [g for g in map(root_of, product.all_input_nodes) if g in backward]
        ending = _only_to_outputs(product) if _frees_something(product, backward) else None
        places = {firsts[g] for g in gradients if g in firsts} if ending else set()
        for place in sorted(places):
            group = _movable(product, ending or (), place)
            if group is not None:
                for node in group:
                    place.prepend(node)
                moved += 1
                break
        else:
            for gradient in gradients:
                firsts.setdefault(gradient, product)
    if moved:
        module.recompile()
    return Rewritten(moved)


def _frees_something(product: fx.Node, backward: Collection[fx.Node]) -> bool:
    """Returns whether the product reads a tensor that the forward computed, other than a view or cast of an input or weight."""
    for operand in product.all_input_nodes:
        source = root_of(operand)
        while source.target in CASTS:
            source = root_of(source.all_input_nodes[0])
        if source not in backward and source.op == "call_function":
            return True
    return False


def _only_to_outputs(product: fx.Node) -> set[fx.Node] | None:
    """The product with the views, casts and sums after it, if no other node lies between it and the outputs; else None."""
    found, stack = {product}, [product]
    while stack:
        for user in stack.pop().users:
            if user.op == "output" or user in found:
                continue
            is_known = user.target in CASTS or user.target in SUMS
            if not is_known and (user.op != "call_function" or op_kind(user) is not OpKind.VIEW):
                return None
            found.add(user)
            stack.append(user)
    return found


def _movable(product: fx.Node, ending: Collection[fx.Node], place: fx.Node) -> list[fx.Node] | None:
    """Nodes to move in front of `place`, in order: the product, views that it reads, and the nodes of `ending` that can follow.

    None if the product reads another node that is not in front of `place`.
    """
    group = _with_sources(product, place, set())
    if group is None:
        return None
    for node in sorted(ending):
        group = _with_sources(node, place, group) or group
    return sorted(group)


def _with_sources(node: fx.Node, place: fx.Node, group: set[fx.Node]) -> set[fx.Node] | None:
    """`group` plus `node` and the views and sizes after `place` that `node` reads; None if it reads any other node there."""
    found, stack = group | {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in found or source < place:  # by position in the graph
                continue
            if source is place or source.op != "call_function":
                return None
            if op_kind(source) not in (OpKind.VIEW, OpKind.SYMBOL):
                return None
            found.add(source)
            stack.append(source)
    return found
