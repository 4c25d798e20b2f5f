"""Saved SymInts: the sizes and other integers that the forward hands to the backward."""

from __future__ import annotations

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.cost_models import OpKind, op_kind


def symints_to_save(joint: joint_graph.Joint) -> list[fx.Node]:
    """SymInts that the forward can compute, including sizes of its values and their views that only the backward needs.

    If the backward computed such a size, a tensor might be recomputed just to read its size.  Only SymInts can be saved; the
    backward computes other symbols again from the tensors that they were read from.
    """
    given, known = set(joint.info.inputs), set[fx.Node]()
    for node in joint.module.graph.nodes:
        if joint.info.is_required_fw(node) or node in given:
            known.add(node)
        elif node.all_input_nodes and known.issuperset(node.all_input_nodes):
            if op_kind(node) in (OpKind.SYMBOL, OpKind.VIEW):
                known.add(node)
    return [n for n in joint.module.graph.nodes if joint_graph.is_saveable_symbol(n) and n in known - given]
