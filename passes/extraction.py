"""`Plan` -> forward and backward modules, through torch's own extraction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from compile_remat import _torch
from compile_remat.passes.plan import Plan
from compile_remat.passes.sizes import known_to_forward


def extract(
    joint: fx.GraphModule | _torch.Joint,
    plan: Plan,
    *,
    num_fwd_outputs: int = 1,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split the joint graph as the plan says.

    The forward returns its outputs, then what the plan saves; the backward takes that and the tangents, and computes the
    rest again just before its first reader.  Graph inputs and symbolic sizes are handed over as the backward needs
    them: they are alive anyway.

    Raises:
        ValueError: The plan names a value that the graph does not have.
    """
    if isinstance(joint, fx.GraphModule):
        joint = _torch.prepare(
            joint, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_lifetime_input_indices
        )
    nodes = {n.name: n for n in joint.module.graph.nodes}
    missing = [name for name in plan.saved if name not in nodes]
    if missing:
        raise ValueError(f"the plan saves {missing[0]!r}, which the graph does not have")
    known = known_to_forward(joint)
    symbols = [n for n in nodes.values() if n in known and _torch.is_saveable_symbol(n) and n not in joint.info.inputs]
    return _torch.extract_modules(joint, [*joint.info.inputs, *symbols, *(nodes[name] for name in plan.saved)])
