"""`Plan` -> forward and backward modules, through torch's own extraction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from compile_remat import _torch
from compile_remat.cost_models import OpKind, describe
from compile_remat.passes.plan import Plan


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
    return _torch.extract_modules(joint, [*joint.info.inputs, *_symbols(joint), *(nodes[name] for name in plan.saved)])


def _symbols(joint: _torch.Joint) -> list[fx.Node]:
    """Sizes that the forward knows, those of its values and their views that only the backward asks for included.

    Left to the backward, such a size would be read off a tensor computed again for nothing else.
    """
    given, known = set(joint.info.inputs), set[fx.Node]()
    for node in joint.module.graph.nodes:
        if joint.info.is_required_fw(node) or node in given:
            known.add(node)
        elif node.all_input_nodes and known.issuperset(node.all_input_nodes):
            if describe(node).kind in (OpKind.SYMBOL, OpKind.VIEW):
                known.add(node)
    return [n for n in joint.module.graph.nodes if _torch.is_saveable_symbol(n) and n in known - given]
