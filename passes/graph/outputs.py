"""Outputs of a joint graph, and the backward steps that read the gradients (tangents) of these outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.cost_models import OpKind, op_kind
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph
from compile_remat.passes.graph.views import readers_of, root_of


def changeable_outputs(joint: joint_graph.Joint) -> frozenset[fx.Node]:
    """Outputs that a plan could save, and that code outside of the graph may change in place before the backward runs.

    Autograd raises an error if a saved tensor was changed before the backward.  If the graph returned a view of the tensor,
    autograd does not notice the change, and gradients are wrong.  Outputs that eager mode saves as well are left out: a derivative
    reads such an output and no view of it is returned, so autograd raises the error in eager mode, too.
    """
    info = joint.info
    needed = set[fx.Node]()  # inputs, direct or indirect, of nodes that depend on a tangent
    for node in reversed(joint.module.graph.nodes):
        if node.op != "output" and (node in info.tangents_closure or not needed.isdisjoint(node.users)):
            needed.add(node)
    returned = [node for node in joint.fwd_outputs if isinstance(node.meta.get("val"), torch.Tensor)]
    as_views = {_owner(node) for node in returned if _owner(node) is not node}
    owners = {n for n in map(_owner, returned) if n.op == "call_function" and n in needed}
    return frozenset(n for n in owners - info.tangents_closure if n in as_views or not _is_read_by_derivative(n, info))


def left_alone(outputs: Iterable[fx.Node], plain: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The changeable outputs of which plain torch.compile saves neither the output nor a view of it.

    Args:
        outputs: The changeable outputs (`changeable_outputs`).
        plain: The nodes that plain torch.compile saves (`joint_graph.plain_choice`).
    """
    return frozenset(outputs).difference(map(_owner, plain))


def owners_of_outputs(joint: joint_graph.Joint) -> list[fx.Node]:
    """The node that owns the memory of each output of the forward, in the order of the outputs."""
    return [_owner(node) for node in joint.fwd_outputs]


def _is_read_by_derivative(node: fx.Node, info: Any) -> bool:
    return any(not info.is_required_fw(reader) for reader in readers_of(node) if reader.op != "output")


def _owner(node: fx.Node) -> fx.Node:
    """The node that owns the memory of `node`; `node` itself unless it is a view or one output of a multi-output view."""
    root = root_of(node)
    if root.op == "call_function" and op_kind(root) is OpKind.ITEM and op_kind(root.all_input_nodes[0]) is OpKind.VIEW:
        return _owner(root.all_input_nodes[0])
    return root


def mark_outputs(graph: DraftGraph) -> None:
    """Set `is_output` of each value that the forward returns, and of each step that the forward or the backward returns."""
    for draft in graph.drafts_of(*graph.joint.fwd_outputs):
        draft.is_output = True
    for draft in graph.drafts_of(*graph.joint.bwd_outputs):
        draft.is_output |= draft.in_backward


def gradient_readers(graph: DraftGraph, step_of: Mapping[Draft, int]) -> dict[fx.Node, tuple[int, ...]]:
    """For the root of each output, the indices of the steps that read its tangent.

    Tangents are matched with outputs by order and size.
    """
    closure = graph.joint.info.tangents_closure
    inputs = graph.joint.module.graph.find_nodes(op="placeholder")  # in the order of the graph
    readers: dict[fx.Node, set[int]] = {n: set() for n in inputs if n in closure}
    for draft, step in step_of.items():
        for tangent in readers.keys() & graph.roots_of(*draft.node.all_input_nodes):
            readers[tangent].add(step)
    open_outputs = [node for node in graph.joint.fwd_outputs if isinstance(node.meta.get("val"), torch.Tensor)]
    found: dict[fx.Node, tuple[int, ...]] = {}
    for tangent, steps in readers.items():
        output = next((n for n in open_outputs if _has_size_of(n, tangent)), None)
        if output is None:
            continue
        del open_outputs[: open_outputs.index(output) + 1]
        found |= {root: tuple(sorted(steps)) for root in graph.roots_of(output) if steps}
    return found


def _has_size_of(node: fx.Node, other: fx.Node) -> bool:
    return str(node.meta["val"].shape) == str(other.meta["val"].shape)
