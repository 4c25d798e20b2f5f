"""Which kernels read a node and what they go over: whether a node and its readers are one kernel."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import Enum
from typing import NamedTuple

import torch
from torch import fx

from compile_remat._torch.codegen_rules import InductorRules
from compile_remat._torch.narrowing.bit_ops import PACK_BITS
from compile_remat._torch.operators import reduced_dims
from compile_remat._torch.sizes import hint_shape
from compile_remat.passes.graph.lowering.expressions import is_inlined, op_name
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph
from compile_remat.passes.graph.views import shape
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION, SCATTER

NEVER_FUSED = -1
"""Stands for the depth of a kernel that nothing is fused with."""

SPLIT_ROW, SPLIT_COLUMN = 8192, 128
"""A sum of more elements than these may be split, of neighbours and of others (``InductorChoices.reduction_split_factor``)."""


def are_one(draft: Draft, kernels: Collection[ReadingKernel], graph: DraftGraph) -> bool:
    """Whether a value's readers may be one fused kernel, with what they read."""
    if any(k.depth == NEVER_FUSED or is_apart(k, draft, graph) for k in kernels):
        return False
    return len({k.depth for k in kernels}) == 1


def is_apart(kernel: ReadingKernel, draft: Draft, graph: DraftGraph) -> bool:
    """Whether a kernel cannot have the loops that compute a value: it sums in another order, or takes a part, as of a slice."""
    has_others = kernel.loops is _Loops.OTHERS and not graph.rules_of(draft.node).reorders_loops
    return kernel.is_split or has_others or 0 < kernel.num_elements < _num_elements(draft)


def are_alike(draft: Draft, kernels: Collection[ReadingKernel]) -> bool:
    """Whether readers are fused kernels that go over as many elements as a pointwise value has."""
    return all(k.depth != NEVER_FUSED and k.num_elements == _num_elements(draft) for k in kernels)


def keeps_its_loops(draft: Draft) -> bool:
    """Whether a node goes over rows and columns: its loops are not those of one that goes over pixels.

    It reads a picture at rows and columns that it looks up, or computes the gradient of a pooling of averages, whose index divides
    them.  In the backward, it may read tensors in both orders of dimensions and be written with its channels innermost: Inductor
    then goes over the dimensions in their order, and what reads the node alone over all of them at once.
    """
    orders = set[bool]()
    for source in _inlined_by(draft):
        if op_name(source) in ("avg_pool2d_backward", "_unsafe_index", "index") and len(shape(source.node)) == 4:
            return True
        same = [s for s in source.sources if not is_inlined(s) and shape(s.node) == shape(draft.node)]
        orders.update(s.is_channels_last for s in same)
    return draft.in_backward and draft.is_channels_last and len(orders) > 1


def goes_over_groups(draft: Draft) -> bool:
    """Whether a node goes over groups of channels and reads tensors with their channels innermost: a group norm's gradient.

    Inductor writes it with neither the pixels nor all channels innermost: no other kernel has its loops, and it does not lie in
    the place of what it reads.
    """
    sources = [s for node in _inlined_by(draft) for s in node.sources if not is_inlined(s)]
    of_all = [s for s in sources if s.is_channels_last and _num_elements(s) == _num_elements(draft)]
    return any(shape(s.node) != shape(draft.node) for s in of_all)


def _inlined_by(draft: Draft) -> list[Draft]:
    """A node, and what is computed in its expression."""
    found = {draft: None}
    stack = [draft]
    while stack:
        new = [s for s in stack.pop().sources if s not in found and is_inlined(s)]
        found.update(dict.fromkeys(new))
        stack += new
    return list(found)


def kernel_depths(graph: DraftGraph) -> dict[Draft, int]:
    """`Draft.depth`, where the reduction of a reduction's smaller result counts, too: what reads it is in another kernel.

    A group norm's backward sums over pixels, then over the channels of a group.  What reads those sums beside the gradient runs
    after two kernels, and the gradient is read from memory.  So it is with a batch norm's backward: its sums go over other
    dimensions than the last ones, and what reads them does not run in the same loops.
    """
    depths: dict[Draft, int] = {}
    reduced: dict[Draft, int] = {}  # the most elements that one of the reductions goes over that it is computed from
    for draft in graph.by_node.values():
        after = {
            s: depths[s] + (s.kernel in (EXTERN, SCATTER) or _ends_kernel(s, reduced, graph)) for s in draft.sources
        }
        depth = depths[draft] = max(after.values(), default=0)
        below = [reduced[s] for s in draft.sources if after[s] == depths[s] == depth]
        own = _elements_reduced(draft) if draft.kernel == REDUCTION else 0
        reduced[draft] = max([*below, own])
    return depths


def _ends_kernel(draft: Draft, reduced: Mapping[Draft, int], graph: DraftGraph) -> bool:
    """Whether what reads a reduction runs in another kernel; of the short ones, those of another reduction's result."""
    if draft.kernel != REDUCTION and draft.num_unrolled < 2:
        return False
    return _elements_reduced(draft) < reduced[draft] or _is_over_others(draft.node, graph.rules_of(draft.node))


def _is_over_others(node: fx.Node, rules: InductorRules) -> bool:
    """Whether a reduction goes over other dimensions than the last ones; one over few elements is a pointwise kernel."""
    sizes, dims = shape(node.all_input_nodes[0]), reduced_dims(node)
    large = [d for d, size in enumerate(sizes) if size > 1]
    kept = [d for d in large if d not in dims]
    is_unrolled = math.prod(sizes[d] for d in large if d in dims) < rules.unrolled_below
    return bool(dims) and not is_unrolled and kept != large[: len(kept)]


def is_drawn_apart(draft: Draft, kernels: Collection[ReadingKernel], graph: DraftGraph) -> bool:
    """Whether random numbers that the backward draws again are drawn by a kernel of their own.

    Inductor draws them in one loop over all elements.  A pointwise kernel that reads them has it, or gets it; a reduction that is
    not read with such a kernel has it only where it goes over all elements at once.
    """
    again = [k for k in kernels if k.runs_again and k.depth != NEVER_FUSED]
    if graph.rules_of(draft.node).reorders_loops or not again:
        return False
    if any(k.loops is _Loops.OTHERS for k in again):
        return True
    is_read_alike = any(k.num_elements == _num_elements(draft) for k in again)
    return not (is_read_alike or all(k.loops is _Loops.ALL for k in again))


class _Loops(Enum):
    """What a reduction goes over."""

    ALL = "all elements, in one loop"
    LAST = "the last dimensions"
    OTHERS = "other dimensions than the last ones"


class ReadingKernel(NamedTuple):
    """A kernel that reads a node.

    Attributes:
        num_elements: 0 where it is not pointwise.
        is_split: As `_is_split` says.
        runs_again: Whether the backward may run it.
        loops: Of a reduction.
    """

    depth: int
    in_backward: bool
    num_elements: int
    is_split: bool = False
    runs_again: bool = False
    loops: _Loops | None = None


def kernels_reading(of: Mapping[Draft, int], graph: DraftGraph) -> dict[Draft, set[ReadingKernel]]:
    """The kernels that read each node, by their depths, NEVER_FUSED for unfused ones.

    A reader that stays in registers is part of its own readers' kernels, which may run much later: the state of a
    recurrent cell is read through two products by the next step's kernel.
    """
    kernels: dict[Draft, set[ReadingKernel]] = {draft: set() for draft in of}
    for draft in reversed(kernels):
        found = kernels[draft]
        is_in_registers = draft.kernel == POINTWISE and not (draft.is_materialised or draft.is_output)
        if draft.kernel == EXTERN or draft.becomes_addmm or draft.node.target is PACK_BITS:
            here = {ReadingKernel(NEVER_FUSED, draft.in_backward, 0)}
        elif is_in_registers and found and all(kernel.depth != NEVER_FUSED for kernel in found):
            here = found
        else:
            runs_again = (not draft.is_output and draft.node in graph.run_again) or draft.in_backward
            loops = _loops(draft, graph)
            is_split = _is_split(draft, graph)
            here = {ReadingKernel(of[draft], draft.in_backward, _num_elements(draft), is_split, runs_again, loops)}
        for source in draft.sources:
            kernels[source] |= here
    return kernels


def _loops(draft: Draft, graph: DraftGraph) -> _Loops | None:
    """What a reduction goes over; None for another kernel.  What it reads with fewer elements gives it several loops."""
    if draft.kernel != REDUCTION:
        return None
    if _is_over_others(draft.node, graph.rules_of(draft.node)):
        return _Loops.OTHERS
    if math.prod(shape(draft.node)) > 1:
        return _Loops.LAST
    sizes = {1, _elements_reduced(draft)}
    operands = (operand for node in _inlined_by(draft) for operand in node.node.all_input_nodes)
    if any(math.prod(shape(operand)) not in sizes for operand in operands):
        return _Loops.LAST
    return _Loops.ALL


def _is_split(draft: Draft, graph: DraftGraph) -> bool:
    """Whether a node is a sum over other dimensions than the last ones that Inductor computes in two halves.

    The first half goes over its parts in an order that no pointwise kernel has: nothing that is written to memory is fused with
    it.  Which sums are split is ``Reduction.num_splits`` in ``ir.py``: few ones of many elements, where those of neighbours are
    few below a 32nd of the others.
    """
    if draft.kernel != REDUCTION:
        return False
    rules, node = graph.rules_of(draft.node), draft.node
    if not rules.split_below or not _is_over_others(node, rules):
        return False
    sizes, dims = shape(node.all_input_nodes[0]), reduced_dims(node)
    num_reduced = math.prod(size for d, size in enumerate(sizes) if d in dims)
    num_kept = math.prod(size for d, size in enumerate(sizes) if d not in dims)
    is_laid_out = len(sizes) == 4 and any(source.is_channels_last for source in draft.sources)
    if (1 if is_laid_out else len(sizes) - 1) in dims:  # each sum reads neighbours
        return num_kept < rules.split_below // 32 and num_reduced > SPLIT_ROW
    return num_kept < rules.split_below and num_reduced > SPLIT_COLUMN


def _num_elements(draft: Draft) -> int:
    return math.prod(shape(draft.node)) if draft.kernel == POINTWISE else 0


def _elements_reduced(draft: Draft) -> int:
    """How many elements a reduction goes over, by what it reads."""
    values = [node.meta.get("val") for node in draft.node.all_input_nodes]
    return max((math.prod(hint_shape(v)) for v in values if isinstance(v, torch.Tensor)), default=0)
