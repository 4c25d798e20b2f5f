"""Positions of the arguments of a graph that its backward reads again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.views import memory_of


def inputs_handed_over(forward: fx.GraphModule, num_fwd_outputs: int) -> frozenset[int]:
    """Positions of the arguments that an extracted forward hands to its backward, directly or through views.

    Args:
        num_fwd_outputs: Number of outputs for the caller; the tensors for the backward stand after them.
    """
    handed: Any = forward.graph.output_node().args[0]
    return _positions(handed[num_fwd_outputs:])


def positions_of_inputs(joint: joint_graph.Joint, names: Collection[str]) -> frozenset[int]:
    """Positions, among the arguments of Dynamo's graph, of the inputs of a joint graph that are in `names`."""
    return _positions(given for given in joint.module.graph.find_nodes(op="placeholder") if given.name in names)


def _positions(nodes: Iterable[object]) -> frozenset[int]:
    positions = (_position(memory_of(node)) for node in nodes if isinstance(node, fx.Node))
    return frozenset(p for p in positions if p is not None)


def _position(node: fx.Node) -> int | None:
    """The position of a tensor among the arguments of Dynamo's graph; None for anything else.

    An inner tensor of a subclass, and a base that torch made of several views, count as the argument that they come from.
    """
    if node.op != "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    desc: Any = node.meta.get("desc")
    while (inner := getattr(desc, "base", None) or getattr(desc, "base_of", None)) is not None:
        desc = inner
    return int(desc.idx) if type(desc).__name__ == "PlainAOTInput" else None
