"""Views of nodes: their bases, owners, readers and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from compile_remat._torch import sizes
from compile_remat.cost_models import OpKind, is_view, op_kind

CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default})
"""Operators that convert a tensor to another dtype."""


def fake_mode_of(value: Any) -> Any:
    """The ``FakeTensorMode`` of a fake tensor; operators called under it return fake tensors."""
    return value.fake_mode


def root_of(node: fx.Node) -> fx.Node:
    """The node that a chain of views starts from; `node` itself if it is no view."""
    while node.op == "call_function" and node.all_input_nodes and is_view(node):
        node = node.all_input_nodes[0]
    return node


def owner_of(node: fx.Node) -> fx.Node:
    """The node that may own the memory of `node`, through views, outputs of multi-output views, and `may_alias` nodes."""
    root = root_of(node)
    if root.op == "call_function" and (is_part(root) or may_alias(root)):
        return owner_of(root.all_input_nodes[0])
    return root


def memory_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory of `node`, through views and outputs of multi-output views."""
    root = root_of(node)
    return memory_of(root.all_input_nodes[0]) if root.op == "call_function" and is_part(root) else root


def is_part(node: fx.Node) -> bool:
    """Returns whether a node is one output of a multi-output view, such as ``split``."""
    return op_kind(node) is OpKind.ITEM and op_kind(node.all_input_nodes[0]) is OpKind.VIEW


def may_alias(node: fx.Node) -> bool:
    """Returns whether Inductor may replace a node by its input: a copy, a cast to the same dtype, a power of one.

    True for each pointwise node with one input of the same dtype and shape.
    """
    if node.op != "call_function" or op_kind(node) is not OpKind.POINTWISE or len(node.all_input_nodes) != 1:
        return False
    value, read = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(read, torch.Tensor):
        return False
    return value.dtype == read.dtype and str(value.shape) == str(read.shape)


def operator_name(node: fx.Node) -> str:
    """The name of the operator that a node calls, without namespace and overload."""
    parts = str(node.target).split(".")
    return parts[-2 if len(parts) > 2 else 0]


def readers_of(node: fx.Node, kind_of: Callable[[fx.Node], OpKind | None] = op_kind) -> set[fx.Node]:
    """The nodes, views excluded, that read a node or a view of it.

    Args:
        kind_of: Returns the kind of a node; a cached one saves time.
    """
    found, pending = set[fx.Node](), [node]
    while pending:
        for reader in pending.pop().users:
            if kind_of(reader) is OpKind.VIEW:
                pending.append(reader)
            else:
                found.add(reader)
    return found


def most_users(node: fx.Node, among: Collection[fx.Node] | None = None) -> int:
    """The largest number of users of the node or of one view of it: Inductor asks of each of them whether it is reused.

    Args:
        among: Nodes that count as users; all nodes by default.
    """
    users = [u for u in node.users if among is None or u in among]
    return max([len(users), *(most_users(view, among) for view in _views(node))])


def is_reshaped(node: fx.Node) -> bool:
    """Returns whether a node has a view with the same elements in another shape."""
    return any(is_reshape(node, view) for view in _views(node))


def is_reshape(node: fx.Node, view: fx.Node) -> bool:
    """Returns whether a view has all elements of a node, in another shape."""
    shapes = shape(node), shape(view)
    return shapes[0] != shapes[1] and math.prod(shapes[0]) == math.prod(shapes[1])


def shape(node: fx.Node) -> tuple[int, ...]:
    """The sizes of the node's tensor, symbols at their hints; () for a node that is no tensor."""
    value = node.meta.get("val")
    return sizes.hint_shape(value) if isinstance(value, torch.Tensor) else ()


def _views(node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if u.op == "call_function" and is_view(u)]
