"""Values that a backward computes twice: a copy after the value, for the readers that the plan gives to the copy."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from compile_remat._torch.joint_graph import Joint
from compile_remat.cost_models import OpKind, op_kind
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.problem.duplication import SUFFIX


def copy_values(backward: fx.GraphModule, joint: Joint, names: Collection[str]) -> Rewritten:
    """Put a copy right after each named value; other copies and the steps of the backward read the copy (`with_copies`).

    Args:
        joint: The joint graph that `backward` was extracted from.

    Returns:
        The number of copies that are read.
    """
    steps = {n.name for n in joint.info.tangents_closure}
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(backward.graph.nodes):
        if node.op == "output" or node.name in steps:
            for source in node.all_input_nodes:
                if source in copies:
                    node.replace_input_with(source, copies[source])
        elif node.name in names or (not copies.keys().isdisjoint(node.all_input_nodes) and _stands_for_another(node)):
            with backward.graph.inserting_after(node):
                copy = backward.graph.create_node(
                    node.op,
                    node.target,
                    fx.map_arg(node.args, lambda n: copies.get(n, n)),
                    fx.map_arg(node.kwargs, lambda n: copies.get(n, n)),
                    node.name + SUFFIX,
                )
            copy.meta = dict(node.meta)
            copies[node] = copy
    made = set(copies.values())
    both, num_read = {*copies, *made}, len(made)
    for node in reversed(backward.graph.nodes):
        if node in both and not node.users:
            num_read -= node in made
            backward.graph.erase_node(node)
    backward.recompile()
    return Rewritten(num_read)


def _stands_for_another(node: fx.Node) -> bool:
    """Returns whether the node is no value of its own: a view, one output of a multi-output view, or a size."""
    kind = op_kind(node)
    return kind in (OpKind.VIEW, OpKind.SYMBOL) or (
        kind is OpKind.ITEM and _stands_for_another(node.all_input_nodes[0])
    )
