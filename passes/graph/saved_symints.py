"""Which sizes and other integers the forward hands to the backward."""

from __future__ import annotations

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.cost_models import OpKind, op_kind


def symints_to_save(joint: joint_graph.Joint) -> list[fx.Node]:
    """Sizes that the forward knows, those of its values and their views that only the backward asks for included.

    Left to the backward, such a size would be read off a tensor computed again for nothing else.  Of all symbols only
    SymInts can be saved; the rest is worked out again, from the tensor that it was read out of.
    """
    given, known = set(joint.info.inputs), set[fx.Node]()
    for node in joint.module.graph.nodes:
        if joint.info.is_required_fw(node) or node in given:
            known.add(node)
        elif node.all_input_nodes and known.issuperset(node.all_input_nodes):
            if op_kind(node) in (OpKind.SYMBOL, OpKind.VIEW):
                known.add(node)
    return [n for n in joint.module.graph.nodes if joint_graph.is_saveable_symbol(n) and n in known - given]
