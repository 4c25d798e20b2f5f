"""Reductions with a kernel of their own: the readers of their results load the reductions' operands from memory again.

Inductor fuses a reduction with what reads its results where one loop nest can hold both: rows first, then the elements of a row
(``SIMDScheduling.can_fuse``).  It cannot where

- the kept dimensions are not the outermost ones in memory: the statistics of a BatchNorm, the gradient of a bias;
- the reduction reduces the results of another one: the mean of the losses of all rows;
- the reduction is split in two, since it has few results and long rows: a GroupNorm of one picture (``Reduction.num_splits``).

A sum over rows joins the kernel of a reduction along the same rows where both load the same large buffer and none reads the
other's results (``MixOrderReduction.can_fuse`` in ``scheduler.py``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from compile_remat._torch import sizes
from compile_remat._torch.codegen_rules import InductorRules
from compile_remat._torch.operators import reduced_dims
from compile_remat.cost_models import OpKind
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph
from compile_remat.passes.graph.views import operator_name
from compile_remat.passes.problem.problem import ITEM, POINTWISE, REDUCTION

MIXED = ("sum", "prod")
"""Reductions over rows that may join a reduction along rows."""

LEAST_MIXED, LEAST_MIXED_ROWS, MOST_MIXED_COLUMNS = 5 * 2**20, 4096, 2**14
"""Least elements and rows, and most columns, of an operand whose reductions are mixed, in ``MixOrderReduction.can_fuse``."""


@dataclass(frozen=True)
class Loops:
    """The loops of a reduction.

    Attributes:
        num_results, length: The number of results, and of elements that each of them reduces.
        along_rows: True if the kept dimensions are the outermost ones in memory.
    """

    num_results: int
    length: int
    along_rows: bool

    def is_split(self, rules: InductorRules) -> bool:
        """Returns whether Inductor reduces in two steps; asked of reductions along rows, as those over rows are separate anyway."""
        return self.num_results < rules.split_below and self.length > rules.unsplit_length

    def mixes_with(self, rows: Loops) -> bool:
        """Returns whether a reduction over rows may join this one along the same rows, by their sizes."""
        is_same = (self.num_results, self.length) == (rows.length, rows.num_results)
        is_large = rows.num_results * rows.length >= LEAST_MIXED and rows.num_results >= LEAST_MIXED_ROWS
        return is_same and is_large and 2 * rows.length <= rows.num_results and rows.length <= MOST_MIXED_COLUMNS


def mark_separate_reductions(graph: DraftGraph) -> None:
    """Set `is_separate` of all reductions with a kernel of their own."""
    groups: dict[tuple[int, bool], dict[Draft, Loops]] = {}
    for draft in graph.by_node.values():
        loops = _loops_of(draft, graph) if draft.kernel == REDUCTION else None
        if loops is not None:
            groups.setdefault((draft.depth, draft.in_backward), {})[draft] = loops
    num_elements = {node.name: math.prod(_shape_of(node)) for node in graph.roots}
    for group in groups.values():
        _mark(group, graph, num_elements)
    for draft in graph.by_node.values():
        if (
            draft.kernel == POINTWISE and draft.op.kind is OpKind.REDUCTION
        ):  # unrolled: it needs several of the other's results
            draft.is_separate = bool(_reductions_read(draft, groups.get((draft.depth, draft.in_backward), {})))


def _mark(group: Mapping[Draft, Loops], graph: DraftGraph, num_elements: Mapping[str, int]) -> None:
    """Set `is_separate` of the reductions between the same kernels of libraries."""
    read = {draft: _reductions_read(draft, group) for draft in group}
    for draft, own in group.items():
        reduces_results = any(group[each] != own for each in read[draft])
        draft.is_separate = not own.along_rows or own.is_split(_rules_of(draft, graph)) or reduces_results
    rows = [draft for draft, own in group.items() if own.along_rows and not draft.is_separate]
    for draft, own in group.items():
        if not own.along_rows and _rules_of(draft, graph).mixes_reductions and operator_name(draft.node) in MIXED:
            draft.is_separate = not any(
                own.mixes_with(group[row])
                and row not in read[draft]
                and draft not in read[row]
                and not _large_loads(draft, num_elements).isdisjoint(_large_loads(row, num_elements))
                for row in rows
            )


def _loops_of(draft: Draft, graph: DraftGraph) -> Loops | None:
    """The loops of a reduction; None of an operator that has as many results as elements, such as a cumulative sum."""
    operand = draft.node.all_input_nodes[0]
    value = operand.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    shape, dims = sizes.hint_shape(value), reduced_dims(draft.node) or frozenset(range(value.dim()))
    if math.prod(_shape_of(draft.node)) == math.prod(shape):
        return None
    order = sorted(range(len(shape)), key=_strides(operand, graph).__getitem__, reverse=True)
    is_kept = [d not in dims for d in order if shape[d] > 1]
    along_rows = is_kept == sorted(is_kept, reverse=True)
    length = math.prod(shape[d] for d in dims)
    return Loops(math.prod(shape) // max(1, length), length, along_rows)


def _rules_of(draft: Draft, graph: DraftGraph) -> InductorRules:
    return graph.rules_of(draft.node.all_input_nodes[0])  # a reduction with several results has no device of its own


def _shape_of(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) else value
    return sizes.hint_shape(first) if isinstance(first, torch.Tensor) else ()


def _strides(operand: fx.Node, graph: DraftGraph) -> tuple[int, ...]:
    """Strides of an operand, in elements; of a channels-last buffer, or of a view of it, those of the buffer's own layout."""
    value = operand.meta["val"]
    roots = list(graph.drafts_of(operand))
    if len(roots) != 1 or not roots[0].is_channels_last:
        return sizes.hint_strides(value)
    root = torch.empty(sizes.hint_shape(roots[0].node.meta["val"]), device="meta")
    laid_out = root.contiguous(memory_format=torch.channels_last)
    if tuple(laid_out.shape) == sizes.hint_shape(value):
        return laid_out.stride()
    try:
        return laid_out.view(sizes.hint_shape(value)).stride()
    except (
        RuntimeError,
        ValueError,
    ):  # of a real and of a fake tensor: Inductor copies the buffer into a contiguous one
        return sizes.hint_strides(value)


def _reductions_read(draft: Draft, group: Collection[Draft]) -> set[Draft]:
    """The reductions of a group whose results a reduction reads, directly or through other nodes of fused kernels."""
    seen, stack = set[Draft](), list(draft.sources)
    while stack:
        source = stack.pop()
        is_fused = source.kernel in (POINTWISE, REDUCTION, ITEM)
        if source not in seen and is_fused and (source.depth, source.in_backward) == (draft.depth, draft.in_backward):
            seen.add(source)
            stack += source.sources
    return seen.intersection(group)


def _large_loads(draft: Draft, num_elements: Mapping[str, int]) -> set[str]:
    """Names of the buffers and inputs of at least half of the operand's elements that a reduction loads."""
    least = math.prod(_shape_of(draft.node.all_input_nodes[0])) // 2
    of = operator.attrgetter("backward_expression" if draft.in_backward else "expression")
    names = {name for source in draft.sources for name in of(source).reads} | {name for name, _ in draft.input_reads}
    return {name for name in names if num_elements.get(name, -1) >= least}
