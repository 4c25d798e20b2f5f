"""Rounding on GPUs: Inductor pads long rows to start at multiples of 128 bytes, and torch's allocator hands out whole blocks."""

from __future__ import annotations

import torch

from compile_remat._torch import sizes
from compile_remat.cost_models import OpKind, counted_bytes
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION


def pad_strides(graph: DraftGraph) -> None:
    """Add the padding of buffers that Inductor's own kernels write to `nbytes`.

    Outputs of the graph have eager mode's strides, and so have operands of unfused kernels other than matrix products.
    """
    unpadded = _unpadded(graph)
    for draft in graph.by_node.values():
        rules = graph.rules_of(draft.node)
        is_flexible = draft.kernel in (POINTWISE, REDUCTION) and not (draft.concatenates or draft.is_channels_last)
        if is_flexible and rules.padded_above is not None and not draft.is_output and draft not in unpadded:
            value = draft.node.meta.get("val")
            draft.nbytes = max(draft.nbytes, sizes.padded_nbytes(value, rules.padded_above, rules.padding_bytes))


def fill_blocks(graph: DraftGraph, *, expandable: bool) -> None:
    """Round `nbytes` of each CUDA buffer up as torch's allocator does, with `expandable` segments or without."""
    for draft in graph.by_node.values():
        value = draft.node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            draft.nbytes = counted_bytes(draft.nbytes, expandable=expandable)


def _unpadded(graph: DraftGraph) -> set[Draft]:
    """Inputs, direct or indirect, of a convolution with no reduction in between, and direct operands of other unfused kernels.

    The inputs of a convolution are followed within its own graph only (``mark_nodes_dislike_padding`` in ``graph.py``).
    """
    found, leading = set[Draft](), set[Draft]()
    for draft in reversed(graph.by_node.values()):
        if draft.op.kind is OpKind.CONV or draft in leading:
            leading |= {s for s in draft.sources if s.kernel != REDUCTION and s.in_backward == draft.in_backward}
        if draft.kernel == EXTERN and draft.op.kind is not OpKind.MATMUL:
            found |= set(draft.sources)
    return found | leading
