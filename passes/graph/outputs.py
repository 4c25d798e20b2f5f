"""What a joint graph returns, and which steps read the gradients that come in for it."""

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

    Autograd refuses a backward that saved what was changed since; if a view was returned, it does not notice, and gradients are
    wrong.  Not among them are outputs that eager mode saves, too, and so refuses to see changed: a derivative reads them, and
    no view of them is returned.
    """
    info = joint.info
    needed = set[fx.Node]()  # to compute what depends on a tangent
    for node in reversed(joint.module.graph.nodes):
        if node.op != "output" and (node in info.tangents_closure or not needed.isdisjoint(node.users)):
            needed.add(node)
    returned = [node for node in joint.fwd_outputs if isinstance(node.meta.get("val"), torch.Tensor)]
    as_views = {_owner(node) for node in returned if _owner(node) is not node}
    owners = {n for n in map(_owner, returned) if n.op == "call_function" and n in needed}
    return frozenset(n for n in owners - info.tangents_closure if n in as_views or not _is_read_by_derivative(n, info))


def left_alone(outputs: Iterable[fx.Node], plain: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Those of the changeable outputs that plain torch.compile does not save, nor a view of them.

    Args:
        plain: What it saves (`joint_graph.plain_choice`).
    """
    return frozenset(outputs).difference(map(_owner, plain))


def _is_read_by_derivative(node: fx.Node, info: Any) -> bool:
    return any(not info.is_required_fw(reader) for reader in readers_of(node) if reader.op != "output")


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory a node is, or is a view of, or is part of a view of."""
    root = root_of(node)
    if root.op == "call_function" and op_kind(root) is OpKind.ITEM and op_kind(root.all_input_nodes[0]) is OpKind.VIEW:
        return _owner(root.all_input_nodes[0])
    return root


def mark_outputs(graph: DraftGraph) -> None:
    """Values are outputs where the forward returns them, steps where either returns them."""
    for draft in graph.drafts_of(*graph.joint.fwd_outputs):
        draft.is_output = True
    for draft in graph.drafts_of(*graph.joint.bwd_outputs):
        draft.is_output |= draft.in_backward


def gradient_readers(graph: DraftGraph, step_of: Mapping[Draft, int]) -> dict[fx.Node, tuple[int, ...]]:
    """For roots of outputs, the steps that read the gradient that comes in: tangents have their outputs' order and sizes."""
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
