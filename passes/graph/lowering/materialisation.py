"""Materialisation: pointwise values that Inductor writes to memory although no unfused kernel reads them, by `InductorRules`."""

from __future__ import annotations

import math

import torch
from torch import fx

from compile_remat._torch.codegen_rules import InductorRules
from compile_remat._torch.operators import reduced_dims, tree_leaves
from compile_remat.passes.graph.lowering.expressions import is_written, joined, load_of, op_name, own_expression
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph
from compile_remat.passes.graph.rewrites.addmm import becoming_addmm
from compile_remat.passes.graph.views import most_users, operator_name, root_of, shape
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE

COPYING = ("_unsafe_index_put", "index_put", "scatter", "scatter_add", "scatter_reduce")
"""Operators whose lowerings write into ``clone(x)`` of their first argument, by a fused or an ATen kernel (``lowering.py``)."""

UNFUSED = -1
"""Stands for the depth of a kernel that is never fused."""

UNROLLED = ("sum", "mean", "amax", "amin", "prod", "any", "all")
"""Reductions with one result, by name."""


def is_unrolled(node: fx.Node, rules: InductorRules) -> bool:
    """Returns whether a reduction is over so few elements that Inductor turns it into a pointwise kernel."""
    if operator_name(node) not in UNROLLED:
        return False
    value, dims = node.all_input_nodes[0].meta["val"], reduced_dims(node)
    sizes = [size for d, size in enumerate(value.shape) if not dims or d in dims]
    if not all(isinstance(size, int) for size in sizes):
        return False
    num_reduced, num_results = math.prod(sizes), math.prod(shape(node))
    return num_reduced == 1 or (num_reduced < rules.unrolled_below and (num_results > 1 or rules.unrolls_to_one))


def read_own(graph: DraftGraph) -> None:
    """Set the fields of each pointwise node that are the same under every plan: its own expression, and facts on its readers."""
    joint = graph.joint
    addmms = becoming_addmm(n for n in joint.module.graph.nodes if n in joint.info.tangents_closure)
    for draft in graph.by_node.values():
        if draft.kernel != POINTWISE:
            continue
        rules, name, users = graph.rules_of(draft.node), op_name(draft), draft.node.users
        draft.is_drawn = name in rules.drawn_ops
        draft.concatenates = name == "cat" and (rules.always_concatenates or _has_places(draft, graph, rules))
        draft.becomes_addmm = draft.node in addmms and not (draft.is_drawn or draft.concatenates)
        is_added = any(u in addmms for u in users)  # an operand of `addmm` is a buffer, like that of any product
        draft.is_always_written = (
            draft.becomes_addmm or is_added or any(str(u.target) in rules.strided_readers for u in users)
        )
        readers = [graph.by_node[u] for u in users if u in graph.by_node]
        in_windows = [u for u in users if operator_name(u) in rules.window_readers and u.args[0] is draft.node]
        draft.is_read_in_windows = any(graph.by_node[u].in_backward == draft.in_backward for u in in_windows)
        draft.is_loaded_again = any(r.in_backward and (r.kernel == EXTERN or r.node in addmms) for r in readers)
        draft.own_expression = own_expression(draft, rules)


def count_reads(graph: DraftGraph) -> None:
    """Follow Inductor's count of the buffers that each fused expression loads (``GraphLowering.run_node``).

    Inductor compiles forward and backward separately: in the backward a value has only the readers that the backward may run.
    """
    for draft in graph.by_node.values():
        if draft.kernel == POINTWISE:
            _count_reads_of(draft, graph)
        elif draft.kernel != CONSTANT:  # a constant is computed inside of the expression: no load
            draft.expression = draft.backward_expression = load_of(draft)


def _count_reads_of(draft: Draft, graph: DraftGraph) -> None:
    draft.concatenates |= op_name(draft) == "cat" and all(map(_is_place, draft.sources))
    if draft.is_drawn or draft.concatenates:
        draft.expression = draft.backward_expression = load_of(draft)
        return
    rules, is_read = graph.rules_of(draft.node), draft.is_loaded_again
    backward = joined(draft, (source.backward_expression for source in draft.sources))
    forward = backward if draft.in_backward else joined(draft, (source.expression for source in draft.sources))
    num_users = most_users(draft.node, graph.run_again)
    is_reused = num_users > 1
    in_windows = draft.is_read_in_windows and len(forward.reads) > 1
    is_always = draft.is_always_written or (in_windows and draft.in_backward)
    is_written_in_backward = is_always or is_written(backward, is_reused, rules)
    draft.is_materialised = draft.is_written_again = is_written_in_backward
    draft.is_written_if_reused = is_written_in_backward and not (
        is_always or is_read or is_written(backward, False, rules)
    )
    if not draft.in_backward:
        is_reused = most_users(draft.node) > 1
        is_always |= in_windows
        draft.is_materialised = is_always or is_written(forward, is_reused, rules)
    by_heavy = is_reused and (forward.has_heavy or backward.has_heavy)
    draft.is_written_for_reads = draft.is_materialised and not (is_always or is_read or by_heavy)
    draft.expression = load_of(draft) if is_read or draft.is_materialised else forward
    draft.backward_expression = load_of(draft) if is_read or is_written_in_backward else backward


def _is_place(part: Draft) -> bool:
    """Returns whether a part of a concatenation has a buffer in both graphs; it is then written into the concatenation's buffer."""
    return part.kernel != POINTWISE or (part.is_materialised and part.is_written_again)


def _has_places(draft: Draft, graph: DraftGraph, rules: InductorRules) -> bool:
    """Returns whether a concatenation on a GPU is a buffer into which its parts are written.

    True if no part is pointwise, or, by `InductorRules.concatenates_shared`, if an unfused kernel reads the concatenation and
    a pointwise part has other readers.
    """
    if all(s.kernel != POINTWISE for s in draft.sources):
        return True
    if not rules.concatenates_shared:
        return False
    is_written = any(graph.by_node[u].kernel == EXTERN for u in draft.node.users if u in graph.by_node)
    return is_written and any(s.kernel == POINTWISE and most_users(s.node) > 1 for s in draft.sources)


def is_fused_scatter(node: fx.Node, rules: InductorRules) -> bool:
    """Returns whether Inductor's own (fused) kernel, not ATen's, writes elements into a copy of the node's first argument."""
    value, name = node.meta.get("val"), getattr(node.target, "__name__", "").split(".")[0]
    if name not in rules.scatters or not isinstance(value, torch.Tensor):
        return False
    indices = [i.meta.get("val") for i in node.all_input_nodes if name != "_unsafe_masked_index_put_accumulate"]
    by_mask = any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
    return value.dtype not in rules.unfused_scatter_dtypes and not by_mask


def mark_written_constants(graph: DraftGraph) -> None:
    """Treat a constant that an unfused kernel reads as pointwise: it is written to memory, and saving it spares that write."""
    for draft in graph.by_node.values():
        if draft.kernel == EXTERN:
            for source in draft.sources:
                if source.kernel == CONSTANT:
                    source.kernel = POINTWISE


def without_start(draft: Draft) -> tuple[Draft, ...]:
    """The sources of a node, without the constant that an unfused scatter starts from: Inductor fills the copy directly."""
    copied = _copied(draft) if draft.kernel == EXTERN else None
    return tuple(s for s in draft.sources if s.kernel != CONSTANT or s.node is not copied)


def _copied(draft: Draft) -> fx.Node | None:
    """The tensor that a scatter copies and writes into; None if the scatter also reads it as another operand, or is no scatter."""
    if op_name(draft) not in COPYING:
        return None
    start, *others = (root_of(node) for node in _operands(draft.node))
    return start if start not in others else None


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order, with repetitions."""
    return [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


def drop_fused_buffers(graph: DraftGraph) -> None:
    """Clear `is_materialised` of a value if one fused kernel computes the value and all its readers.

    The rule is crude: nodes with equally many unfused kernels before them count as one kernel.  Without this pass the predicted
    peak of plain torch.compile was 11 % too high for BERT and 5 % for Llama on CPUs, and the lowest peak of a U-Net in bfloat16
    for CUDA 9 %.
    """
    places: dict[Draft, set[int]] = {draft: set() for draft in graph.by_node.values()}
    for draft in reversed(places):
        found = places[draft]
        is_unfused = draft.kernel == EXTERN or draft.becomes_addmm
        is_in_registers = draft.kernel == POINTWISE and not (draft.is_materialised or draft.is_output)
        inside = found if is_in_registers and found and UNFUSED not in found else {draft.depth}
        for source in draft.sources:
            places[source] |= {UNFUSED} if is_unfused else inside
    for draft, found in places.items():
        if draft.is_materialised and not draft.becomes_addmm and found == {draft.depth}:
            draft.is_materialised = False


def mark_parts(graph: DraftGraph) -> None:
    """Make each concatenation a buffer and set `parts`: a value is written into the first one that reads it (``ConcatKernel``)."""
    for draft in graph.by_node.values():
        draft.is_materialised |= draft.concatenates
    taken: set[Draft] = set()
    for whole in graph.values:
        for node in whole.node.all_input_nodes if whole.concatenates else ():
            part = graph.by_node.get(node)
            if part is None or part.kernel != POINTWISE or part in taken:
                continue
            if not (part.concatenates or part.is_output or part.is_drawn):
                taken.add(part)
                whole.parts.append(part)
