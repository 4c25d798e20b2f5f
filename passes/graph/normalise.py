"""A joint graph, made ready to be planned: torch's own steps, and the rewrites that make every plan of it better."""

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
    """Dead code, CSE, tags, classification: the graph that plain torch.compile splits.

    Args:
        module: A joint graph; rewritten in place.
        num_fwd_outputs: How many of its outputs are the forward's.
        static_lifetime_input_indices: Positions of the inputs that live as long as the model.
    """
    return joint_graph.prepare(
        module, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_lifetime_input_indices
    )


def rewritten(joint: joint_graph.Joint, *, splits_convolutions: bool = True) -> joint_graph.Joint:
    """The same graph, in place, with the rewrites; see the modules in `rewrites`.

    Args:
        splits_convolutions: Whether a convolution's gradients are made one after the other: a second kernel call for a lower
            peak.  Who does so makes one layout for both (`lay_gradients_out_once`) where Inductor compiles the backward.
    """
    if joint.has_backward:
        joint.info.unclaimed_nodes.update(replace_shape_only_inputs(joint.module))
        if splits_convolutions:
            split_convolution_gradients(joint)
        separate_sigmoids(joint.module)
        move_weight_gradients_up(joint.module, joint.info.tangents_closure)
        make_sibling_gradients_together(joint.module, joint.info.tangents_closure)
    return joint
