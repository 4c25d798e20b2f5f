"""Preparation of a joint graph for planning by torch's own passes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from compile_remat._torch import joint_graph


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
