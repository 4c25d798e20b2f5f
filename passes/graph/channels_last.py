"""Which buffers have their channels innermost, and what convolutions get copies of because it has not."""

from __future__ import annotations

from torch import fx

from compile_remat._torch import conv_layout, sizes
from compile_remat.cost_models import OpKind
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph
from compile_remat.passes.graph.views import CASTS, is_reshape, is_reshaped, shape
from compile_remat.passes.problem.problem import EXTERN, ITEM, POINTWISE


def mark_channels_last(graph: DraftGraph) -> None:
    """A convolution's outputs have their channels innermost, and so has what is computed from such elementwise.

    What is in memory when somebody asks for it in another shape is made in the order of its dimensions; not so what stays in
    registers: what is computed of that follows what it reads.
    """
    for draft in graph.by_node.values():
        if conv_layout.is_channels_last(draft.node.meta.get("val"), graph.rules):
            draft.is_channels_last = _is_channels_last(draft, graph)


def _is_channels_last(draft: Draft, graph: DraftGraph) -> bool:
    if draft.kernel == ITEM:
        return any(s.op.kind is OpKind.CONV for s in draft.sources)
    if draft.op.kind is OpKind.CONV:
        return True
    if draft.kernel != POINTWISE or (is_reshaped(draft.node) and not _is_in_registers(draft, graph)):
        return False
    if draft.concatenates:  # `ConcatKernel.create` knows no order of what is not computed yet
        return any(s.is_channels_last and (s.kernel != POINTWISE or s.concatenates) for s in draft.sources)
    return any(s.is_channels_last and shape(s.node) == shape(draft.node) for s in draft.sources)


def _is_in_registers(draft: Draft, graph: DraftGraph) -> bool:
    is_read = any(graph.by_node[u].kernel == EXTERN for u in draft.node.users if u in graph.by_node)
    return not (draft.is_materialised or draft.concatenates or draft.is_drawn or is_read)


def mark_layout_copies(graph: DraftGraph) -> None:
    """What convolutions read in another layout than their own is copied; the backward gets the forward's copies of inputs.

    An input that a cast hands to a convolution is copied as well, before the cast.
    """
    last: dict[str, tuple[object, Draft]] = {}
    for draft in graph.by_node.values():
        if draft.op.kind is OpKind.CONV:
            _mark_copied_operands(draft, graph)
            for node in draft.node.all_input_nodes:
                cast = graph.by_node.get(node)
                if cast is not None and node.target in CASTS:
                    node, reader = node.all_input_nodes[0], cast
                else:
                    reader = draft
                if _is_input(node, graph) and (reader is cast or draft.in_backward):
                    last[node.name] = node.meta.get("val"), reader
    for value, reader in last.values():
        if conv_layout.is_copied(value, graph.rules):
            reader.copied_input_bytes += sizes.storage_nbytes(value)


def _is_input(node: fx.Node, graph: DraftGraph) -> bool:
    return node.op == "placeholder" and node not in graph.joint.info.tangents_closure


def _mark_copied_operands(convolution: Draft, graph: DraftGraph) -> None:
    """A pointwise operand in another layout is copied by a kernel that stands before the convolution.

    Then the two lie side by side; when the convolution runs, its outputs lie in the place of one of them.  The copy of a gradient
    that the caller hands over lies beside the outputs: the gradient itself is the caller's.
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
                draft.ordered_by = [s for s in draft.sources if s.is_channels_last]
                convolution.copies.append(draft)
            elif is_reshape(draft.node, node):
                convolution.copied_bytes = max(convolution.copied_bytes, draft.nbytes - output_bytes)
