"""`Plan` -> forward and backward modules, through torch's own extraction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.rewrite_list import apply
from compile_remat.passes.graph.rewrites.contract import Context, Stage
from compile_remat.passes.graph.rewrites.offload import offload_saved
from compile_remat.passes.graph.saved_symints import symints_to_save
from compile_remat.passes.graph.snapshots import reading_snapshots, restore_forward
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
    context = Context(joint=joint, plan=plan)
    with reading_snapshots(joint, frozenset(plan.saved)):
        modules = joint_graph.extract_modules(joint, handed, lambda backward: apply(Stage.EXTRACTED, backward, context))
    restore_forward(modules[0], joint)
    offload_saved(*modules, plan.offloaded)
    return modules
