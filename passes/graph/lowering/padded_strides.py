"""What GPUs round up: Inductor lays long rows out to start at multiples of 128 bytes, torch's allocator hands out whole blocks."""

from __future__ import annotations

import torch

from compile_remat._torch import sizes
from compile_remat.cost_models import OpKind, counted_bytes
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION


def pad_strides(graph: DraftGraph) -> None:
    """Count the padding of what Inductor's own kernels write.

    What is returned has eager mode's strides, and so has what unfused kernels read, matrix products apart.
    """
    unpadded = _unpadded(graph)
    for draft in graph.by_node.values():
        rules = graph.rules_of(draft.node)
        is_flexible = draft.kernel in (POINTWISE, REDUCTION) and not (draft.concatenates or draft.is_channels_last)
        if is_flexible and rules.padded_above is not None and not draft.is_output and draft not in unpadded:
            value = draft.node.meta.get("val")
            draft.nbytes = max(draft.nbytes, sizes.padded_nbytes(value, rules.padded_above, rules.padding_bytes))


def fill_blocks(graph: DraftGraph, *, expandable: bool) -> None:
    """Count what CUDA's allocator counts for a buffer, whose segments are `expandable` or not."""
    for draft in graph.by_node.values():
        value = draft.node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            draft.nbytes = counted_bytes(draft.nbytes, expandable=expandable)


def _unpadded(graph: DraftGraph) -> set[Draft]:
    """What leads to a convolution without a reduction in between, and what other unfused kernels read themselves.

    Inductor looks for the former in one graph at a time (``mark_nodes_dislike_padding`` in ``graph.py``).
    """
    found, leading = set[Draft](), set[Draft]()
    for draft in reversed(graph.by_node.values()):
        if draft.op.kind is OpKind.CONV or draft in leading:
            leading |= {s for s in draft.sources if s.kernel != REDUCTION and s.in_backward == draft.in_backward}
        if draft.kernel == EXTERN and draft.op.kind is not OpKind.MATMUL:
            found |= set(draft.sources)
    return found | leading
