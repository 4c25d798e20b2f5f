"""Symbolic sizes: which of them the forward can hand over, so that the backward computes no tensor to ask for its size."""

from __future__ import annotations

from torch import fx

from compile_remat import _torch
from compile_remat.cost_models import OpKind, describe


def known_to_forward(joint: _torch.Joint) -> set[fx.Node]:
    """What the forward has at no cost: its own nodes and inputs, views of them, and the sizes of all these."""
    known: set[fx.Node] = set(joint.info.inputs)
    for node in joint.module.graph.nodes:
        if joint.info.is_required_fw(node):
            known.add(node)
        elif node.all_input_nodes and known.issuperset(node.all_input_nodes):
            if describe(node).kind in (OpKind.SYMBOL, OpKind.VIEW):
                known.add(node)
    return known
