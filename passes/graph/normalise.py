"""Preparation of a joint graph for planning: torch's own passes, and the rewrites that make every plan better."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.rewrites.convolution_gradients import split_convolution_gradients
from compile_remat.passes.graph.rewrites.shape_only_inputs import replace_shape_only_inputs
from compile_remat.passes.graph.rewrites.sibling_gradients import make_sibling_gradients_together
from compile_remat.passes.graph.rewrites.sigmoids import separate_sigmoids
from compile_remat.passes.graph.rewrites.weight_gradients_first import move_weight_gradients_up


def as_in_torch(
    module: fx.GraphModule, *, num_fwd_outputs: int, static_lifetime_input_indices: Sequence[int] | None = None
) -> joint_graph.Joint:
    """Remove dead code, run CSE, set tags and classify nodes, as plain torch.compile does before it splits the graph.

    Args:
        module: A joint graph; rewritten in place.
        num_fwd_outputs: Number of outputs that belong to the forward.
        static_lifetime_input_indices: Positions of the inputs that live as long as the model.
    """
    return joint_graph.prepare(
        module, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_lifetime_input_indices
    )


def rewritten(joint: joint_graph.Joint, *, splits_convolutions: bool = True) -> joint_graph.Joint:
    """Apply the rewrites of `rewrites` to a joint graph, in place, if the graph has a backward.

    Args:
        splits_convolutions: If True, a convolution's gradients are computed one after the other: a second kernel call for a lower
            peak.  The caller must then call `lay_gradients_out_once` where Inductor compiles the backward.
    """
    if joint.has_backward:
        joint.info.unclaimed_nodes.update(replace_shape_only_inputs(joint.module))
        if splits_convolutions:
            split_convolution_gradients(joint)
        separate_sigmoids(joint.module)
        move_weight_gradients_up(joint.module, joint.info.tangents_closure)
        make_sibling_gradients_together(joint.module, joint.info.tangents_closure)
    return joint
