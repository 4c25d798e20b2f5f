"""Which pointwise values Inductor writes to memory although no unfused kernel reads them, by its `InductorRules`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from compile_remat.passes.graph.node_drafts import Draft, DraftGraph
from compile_remat.passes.graph.rewrites.addmm import becoming_addmm
from compile_remat.passes.graph.views import most_users
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE

NEVER_FUSED = -1
"""Stands for the depth of a kernel that nothing is fused with."""


def count_reads(graph: DraftGraph) -> None:
    """Follow Inductor's count of the buffers that each fused expression reads (``GraphLowering.run_node``)."""
    joint = graph.joint
    addmms = becoming_addmm(n for n in joint.module.graph.nodes if n in joint.info.tangents_closure)
    for draft in graph.by_node.values():
        if draft.kernel == POINTWISE:
            _count_reads_of(draft, graph, addmms)
        elif draft.kernel != CONSTANT:  # an index or a fill is written into the expression: nothing is read
            draft.expression_reads = frozenset({draft.node.name})


def _count_reads_of(draft: Draft, graph: DraftGraph, addmms: Collection[fx.Node]) -> None:
    rules, target = graph.rules_of(draft.node), draft.op.target
    name = target.split(".")[1] if "." in target else target
    reads = frozenset().union(*(s.expression_reads for s in draft.sources), [name for name, _ in draft.input_reads])
    draft.has_heavy = name in rules.heavy_ops or any(s.has_heavy for s in draft.sources)
    draft.is_drawn = name in rules.drawn_ops
    has_buffers = all(s.kernel != POINTWISE for s in draft.sources)
    draft.concatenates = name == "cat" and (rules.always_concatenates or has_buffers)
    if draft.is_drawn or draft.concatenates:
        draft.expression_reads = frozenset({draft.node.name})
        return
    is_reused = most_users(draft.node) > 1
    draft.is_materialised = (
        len(reads) > rules.max_reads
        or (is_reused and (len(reads) > rules.max_reads_if_reused or draft.has_heavy))
        or draft.node in addmms
        or any(str(u.target) in rules.strided_readers for u in draft.node.users)
    )
    readers = [graph.by_node[u] for u in draft.node.users if u in graph.by_node]
    if draft.is_materialised or any(r.in_backward and (r.kernel == EXTERN or r.node in addmms) for r in readers):
        draft.expression_reads, draft.has_heavy = frozenset({draft.node.name}), False
    else:
        draft.expression_reads = reads


def mark_written_constants(graph: DraftGraph) -> None:
    """A constant that an unfused kernel reads is written to memory like any other value: saving it spares that."""
    for draft in graph.by_node.values():
        if draft.kernel == EXTERN:
            for source in draft.sources:
                if source.kernel == CONSTANT:
                    source.kernel = POINTWISE


def drop_inner_buffers(graph: DraftGraph) -> None:
    """A materialised value whose readers all lie in its own fused kernel is never allocated; a concatenation always is."""
    depths = _depths_of_readers(graph.by_node)
    for draft in graph.by_node.values():
        if draft.concatenates:
            draft.is_materialised = True
        elif draft.is_materialised:
            draft.is_materialised = any(depth != draft.depth for depth in depths[draft])


def _depths_of_readers(by_node: Mapping[fx.Node, Draft]) -> dict[Draft, set[int]]:
    """Depths of the kernels that read each node, NEVER_FUSED for unfused ones.

    A reader that stays in registers is part of its own readers' kernels, which may run much later: the state of a
    recurrent cell is read through two products by the next step's kernel.
    """
    depths: dict[Draft, set[int]] = {draft: set() for draft in by_node.values()}
    for draft in reversed(depths):
        found = depths[draft]
        is_in_registers = draft.kernel == POINTWISE and not (draft.is_materialised or draft.is_output)
        if draft.kernel == EXTERN:
            here = {NEVER_FUSED}
        elif is_in_registers and found and NEVER_FUSED not in found:
            here = found
        else:
            here = {draft.depth}
        for source in draft.sources:
            depths[source] |= here
    return depths


def mark_parts(graph: DraftGraph) -> None:
    """A value is written into its place in the first concatenation that reads it, and has no other buffer (``ConcatKernel``)."""
    taken: set[Draft] = set()
    for whole in graph.values:
        for node in whole.node.all_input_nodes if whole.concatenates else ():
            part = graph.by_node.get(node)
            if part is None or part.kernel != POINTWISE or part in taken:
                continue
            if not (part.concatenates or part.is_output or part.is_drawn):
                taken.add(part)
                whole.parts.append(part)
