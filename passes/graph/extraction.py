"""`Plan` -> forward and backward modules, through torch's own extraction."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.cost_models import OpKind, op_kind
from compile_remat.passes.graph.saved_symints import symints_to_save
from compile_remat.passes.graph.snapshots import reading_snapshots, restore_forward
from compile_remat.passes.problem.duplication import SUFFIX
from compile_remat.passes.problem.plan import Plan


def extract(
    joint: fx.GraphModule | joint_graph.Joint,
    plan: Plan,
    *,
    num_fwd_outputs: int = 1,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split the joint graph into a forward and a backward module as the plan says.

    The forward returns its outputs, then the saved tensors.  The backward takes the saved tensors and the tangents, and recomputes
    all other values just before their first reader, or twice where the plan says so.  Graph inputs and symbolic sizes that the
    backward needs are handed over as well: they are alive anyway.

    Raises:
        ValueError: The plan saves a value that the graph does not have.
    """
    if isinstance(joint, fx.GraphModule):
        joint = joint_graph.prepare(
            joint, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_lifetime_input_indices
        )
    nodes = {n.name: n for n in joint.module.graph.nodes}
    missing = [name for name in plan.saved if name not in nodes]
    if missing:
        raise ValueError(f"the plan saves {missing[0]!r}, which the graph does not have")
    saved = [nodes[name] for name in plan.saved]
    # The backward makes views of saved tensors anew, unless a tag keeps these views out of the backward.
    forward_only = [n for n in joint_graph.forward_only(joint) if n not in saved]
    handed = [*joint.info.inputs, *symints_to_save(joint), *saved, *forward_only]
    with reading_snapshots(joint, frozenset(plan.saved)):
        modules = joint_graph.extract_modules(joint, handed, functools.partial(_rewrite, joint=joint, plan=plan))
    restore_forward(modules[0], joint)
    return modules


def _rewrite(backward: fx.GraphModule, joint: joint_graph.Joint, plan: Plan) -> None:
    """Change the backward as the plan says: duplicate the values in `Plan.again`, write those in `Plan.written` to memory."""
    _copy(backward, joint, frozenset(plan.again))
    joint_graph.write_to_memory(backward, frozenset(plan.written))


def _copy(backward: fx.GraphModule, joint: joint_graph.Joint, names: Collection[str]) -> None:
    """Put a copy right after each named value; other copies and the steps of the backward read the copy (`with_copies`)."""
    steps = {n.name for n in joint.info.tangents_closure}
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(backward.graph.nodes) if names else ():
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
    both = {*copies, *copies.values()}
    for node in reversed(backward.graph.nodes):
        if node in both and not node.users:
            backward.graph.erase_node(node)
    backward.recompile()


def _stands_for_another(node: fx.Node) -> bool:
    """Returns whether the node is no value of its own: a view, one output of a multi-output view, or a size."""
    kind = op_kind(node)
    return kind in (OpKind.VIEW, OpKind.SYMBOL) or (
        kind is OpKind.ITEM and _stands_for_another(node.all_input_nodes[0])
    )
