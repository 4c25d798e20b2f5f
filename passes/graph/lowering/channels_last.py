"""Channels-last layout: buffers with their channels innermost, and copies of convolution operands in another layout."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from compile_remat._torch import conv_layout, sizes
from compile_remat.cost_models import OpKind
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph
from compile_remat.passes.graph.rewrites.convolution_gradients import read_by_both
from compile_remat.passes.graph.views import is_reshape, is_reshaped, shape
from compile_remat.passes.problem.problem import EXTERN, ITEM, POINTWISE


def mark_channels_last(graph: DraftGraph) -> None:
    """Set `is_channels_last`: for a convolution's outputs, and for values that are computed from them elementwise.

    A value in memory that a node reads in another shape is contiguous instead; a value in registers takes the layout of its inputs.
    In the backward, an input, direct or indirect, of a convolution is channels-last if Inductor writes it for its own expression,
    and so is a gradient that both operators of a split convolution read.
    """
    backward = [node for node in graph.joint.module.graph.nodes if node in graph.joint.info.tangents_closure]
    preferring, laid_out = _before_convolutions(backward), read_by_both(backward, graph.rules)
    for draft in graph.by_node.values():
        if _is_laid_out(draft, laid_out):
            draft.is_channels_last = True
        elif conv_layout.is_channels_last(draft.node.meta.get("val"), graph.rules):
            draft.is_channels_last = _is_channels_last(draft, graph) or (
                draft.node in preferring and _is_written_itself(draft)
            )


def _before_convolutions(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Convolutions among `nodes` and their direct and indirect inputs (``GraphLowering.find_nodes_prefer_channels_last``)."""
    found = set[fx.Node]()
    for node in reversed(nodes):
        if node.target is torch.ops.aten.convolution.default or not found.isdisjoint(node.users):
            if node.target is not torch.ops.aten.bmm.default:  # the result of bmm is contiguous
                found.add(node)
    return found


def _is_written_itself(draft: Draft) -> bool:
    """Returns whether Inductor writes a value because of its own expression or readers, not because of the readers of a view."""
    is_pointwise = draft.kernel == POINTWISE and not (draft.concatenates or draft.is_drawn)
    return is_pointwise and draft.is_materialised and (len(draft.node.users) > 1 or not draft.is_written_if_reused)


def _is_laid_out(draft: Draft, gradients: Collection[fx.Node]) -> bool:
    """Returns whether a value is computed by the layout conversion of a gradient that it is, or that is a view of it.

    Args:
        gradients: The gradients that `lay_gradients_out_once` converts.
    """
    if draft.kernel != POINTWISE or draft.concatenates:
        return False
    if draft.node in gradients:
        return True
    views = [user for user in draft.node.users if user in gradients]
    is_read_by_others = len(draft.node.users) > 1
    return bool(views) and (not draft.is_materialised or (draft.is_written_if_reused and not is_read_by_others))


def _is_channels_last(draft: Draft, graph: DraftGraph) -> bool:
    if draft.kernel == ITEM:
        return any(s.op.kind is OpKind.CONV for s in draft.sources)
    if draft.op.kind is OpKind.CONV:
        return True
    if draft.kernel != POINTWISE or (is_reshaped(draft.node) and not _is_in_registers(draft, graph)):
        return False
    if draft.concatenates:  # `ConcatKernel.create` knows the layout of buffers only
        return any(s.is_channels_last and (s.kernel != POINTWISE or s.concatenates) for s in draft.sources)
    return any(s.is_channels_last and shape(s.node) == shape(draft.node) for s in draft.sources)


def _is_in_registers(draft: Draft, graph: DraftGraph) -> bool:
    is_read = any(graph.by_node[u].kernel == EXTERN for u in draft.node.users if u in graph.by_node)
    return not (draft.is_materialised or draft.concatenates or draft.is_drawn or is_read)


def mark_layout_copies(graph: DraftGraph) -> None:
    """Count the copies of convolution operands that are not channels-last; the backward reads the forward's copies of inputs.

    An input is copied at the forward's start if the backward reads it and a convolution depends on it, directly or not:
    Inductor returns each direct or indirect input of a convolution as channels-last (``GraphLowering.run_node``, outputs).
    """
    forward = [node for node in graph.joint.module.graph.nodes if node not in graph.joint.info.tangents_closure]
    preferring = _before_convolutions(forward)
    last: dict[fx.Node, Draft] = {}
    for draft in graph.by_node.values():
        is_convolution = draft.op.kind is OpKind.CONV
        if is_convolution:
            _mark_copied_operands(draft, graph)
        if draft.node not in graph.run_again:
            continue
        for node in graph.roots_of(*draft.node.all_input_nodes):
            is_laid_out = node in preferring or (is_convolution and draft.in_backward)
            if (
                is_laid_out
                and _is_input(node, graph)
                and (node not in last or draft.in_backward or not last[node].in_backward)
            ):
                last[node] = draft
    for node, reader in last.items():
        if conv_layout.is_copied(node.meta.get("val"), graph.rules):
            reader.copied_input_bytes += sizes.storage_nbytes(node.meta.get("val"))


def _is_input(node: fx.Node, graph: DraftGraph) -> bool:
    return node.op == "placeholder" and node not in graph.joint.info.tangents_closure


def _mark_copied_operands(convolution: Draft, graph: DraftGraph) -> None:
    """Count the copies that are made of a convolution's pointwise operands in another layout, and of tangents.

    A kernel before the convolution makes the copy, and operand and copy are alive together.  When the convolution runs, its outputs
    take the place of one of the two.  The copy of a tangent is alive beside the outputs, because the caller owns the tangent.
    """
    value = convolution.node.meta.get("val")
    outputs = value if isinstance(value, list | tuple) else (value,)
    output_bytes = sum(sizes.storage_nbytes(v) for v in outputs)
    for node in convolution.node.all_input_nodes:
        is_given = node.op == "placeholder" and node in graph.joint.info.tangents_closure
        if is_given and conv_layout.is_copied(node.meta.get("val"), graph.rules):
            convolution.copied_bytes = max(convolution.copied_bytes, sizes.storage_nbytes(node.meta.get("val")))
        if not conv_layout.is_channels_last(node.meta.get("val"), graph.rules):
            continue
        for draft in graph.drafts_of(node):
            if draft.kernel != POINTWISE or draft.is_channels_last:
                continue
            if draft.concatenates:
                draft.copied_bytes = draft.nbytes
                is_never_in_order = convolution.in_backward and graph.rules_of(draft.node).gradients_read_eager_strides
                draft.ordered_by = [] if is_never_in_order else [s for s in draft.sources if s.is_channels_last]
                convolution.copies.append(draft)
            elif is_reshape(draft.node, node):
                convolution.copied_bytes = max(convolution.copied_bytes, draft.nbytes - output_bytes)
