"""Which pointwise values Inductor writes to memory although no unfused kernel reads them, by its `InductorRules`."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import fx

from compile_remat._torch.codegen_rules import OWN_NUMBERS, InductorRules
from compile_remat._torch.narrowing.bit_ops import PACK_BITS
from compile_remat._torch.operators import (
    computed_dtype,
    is_spare_cast,
    numbers_of,
    promoted_inputs,
    reduced_dims,
    tree_leaves,
)
from compile_remat._torch.sizes import hint_shape
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph, Expression
from compile_remat.passes.graph.rewrites.addmm import becoming_addmm
from compile_remat.passes.graph.rewrites.shape_only_inputs import POOLINGS
from compile_remat.passes.graph.views import most_users, operator_name, root_of, shape
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE, REDUCTION, SCATTER

aten = torch.ops.aten

KEPT = "remat_kept_if_read_once"
"""In `fx.Node.meta` of the joint graph and of what is extracted of it: a value that `kept_values` keeps in memory."""

NEVER_FUSED = -1
"""Stands for the depth of a kernel that nothing is fused with."""

LARGE_FOR_ALL = 100
"""An expression with more operations is materialised even if it reads one buffer (``GraphLowering.run_node``)."""

FILLS = (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)
"""Constants that are one number everywhere."""

SPLIT_ROW, SPLIT_COLUMN = 8192, 128
"""A sum of more elements than these may be split, of neighbours and of others (``InductorChoices.reduction_split_factor``)."""

COPYING = ("_unsafe_index_put", "index_put", "scatter", "scatter_add", "scatter_reduce")
"""Operators whose lowerings write into ``clone(x)`` of their first argument, whoever writes the elements (``lowering.py``)."""


UNROLLED = ("sum", "mean", "amax", "amin", "prod", "any", "all")
"""Reductions with one result, by name."""


class _Number(NamedTuple):
    """A number as an operation."""

    text: str
    dtype: torch.dtype | None


def num_unrolled(node: fx.Node, rules: InductorRules) -> int:
    """Of how many elements each element is reduced inside of a fused expression; 0 where Inductor makes a reduction of it."""
    if operator_name(node) not in UNROLLED:
        return 0
    value, dims = node.all_input_nodes[0].meta["val"], reduced_dims(node)
    sizes = [size for d, size in enumerate(value.shape) if not dims or d in dims]
    if not all(isinstance(size, int) for size in sizes):
        return 0
    num_reduced, num_results = math.prod(sizes), math.prod(shape(node))
    if num_reduced == 1:
        return 1
    return num_reduced if num_reduced < rules.unrolled_below and (num_results > 1 or rules.unrolls_to_one) else 0


def read_own(graph: DraftGraph) -> None:
    """Note of each pointwise node what is so in the graphs of every plan: its own operations, and what reads it."""
    joint = graph.joint
    addmms = becoming_addmm(n for n in joint.module.graph.nodes if n in joint.info.tangents_closure)
    for draft in graph.by_node.values():
        if draft.kernel != POINTWISE:
            continue
        rules, name, users = graph.rules_of(draft.node), _name(draft), draft.node.users
        draft.is_drawn = name in rules.drawn_ops
        draft.concatenates = name == "cat" and (rules.always_concatenates or _has_places(draft, graph, rules))
        draft.becomes_addmm = draft.node in addmms and not (draft.is_drawn or draft.concatenates)
        is_added = any(u in addmms for u in users)  # an operand of `addmm` is a buffer, as of any product
        draft.is_always_written = (
            draft.becomes_addmm or is_added or any(str(u.target) in rules.strided_readers for u in users)
        )
        readers = [graph.by_node[u] for u in users if u in graph.by_node]
        draft.is_loaded_again = any(r.in_backward and (r.kernel == EXTERN or r.node in addmms) for r in readers)
        draft.own_expression, draft.further_views = _own_expression(draft, rules), _further_views(draft)


def count_reads(graph: DraftGraph) -> None:
    """Follow Inductor's count of the buffers and operations of each fused expression (``GraphLowering.run_node``).

    Inductor sees forward and backward apart: there a value has only those readers that the backward may run.
    """
    for draft in graph.by_node.values():
        if draft.kernel == POINTWISE:
            _count_reads_of(draft, graph)
        elif draft.kernel == CONSTANT:  # an index or a fill is written into the expression: nothing is read
            draft.expression = draft.backward_expression = Expression(ops=frozenset({_constant(draft.node)}))
        else:
            draft.expression = draft.backward_expression = _load_of(draft)
            if is_variance(draft.node):
                draft.expression = _scaled(draft)
                draft.backward_expression = _load_of(draft) if graph.is_saved(draft.node) else draft.expression


def _count_reads_of(draft: Draft, graph: DraftGraph) -> None:
    draft.concatenates |= _name(draft) == "cat" and all(map(_is_place, draft.sources))
    if draft.is_drawn or draft.concatenates:
        draft.expression = draft.backward_expression = _load_of(draft)
        return
    rules, is_always, is_read = graph.rules_of(draft.node), draft.is_always_written, draft.is_loaded_again
    operands = _operands_of(draft)
    backward = joined(draft, [as_taken(s, s.backward_expression, draft) for s in operands])
    forward = backward if draft.in_backward else joined(draft, [as_taken(s, s.expression, draft) for s in operands])
    num_users = most_users(draft.node, graph.run_again)
    is_reused = num_users > 1
    is_kept = graph.saved is not None and KEPT in draft.node.meta and num_users == 1  # as `write_kept_values` asks
    is_written_in_backward = is_always or is_kept or is_written(backward, is_reused, rules)
    draft.is_materialised = draft.is_written_again = is_written_in_backward
    draft.is_written_if_reused = is_written_in_backward and not (
        is_always or is_kept or is_read or is_written(backward, False, rules)
    )
    if not draft.in_backward:
        draft.is_materialised = is_always or is_written(forward, most_users(draft.node) > 1, rules)
    elif is_written_in_backward and not is_always and not _has_many_reads(backward, is_reused, rules):
        draft.excess_ops = _num_ops(backward) - rules.max_ops
        draft.spared_ops = _spared_ops(draft)
    draft.expression = _load_of(draft) if is_read or draft.is_materialised else forward
    is_loaded = is_read or is_written_in_backward or graph.is_saved(draft.node)
    draft.backward_expression = _load_of(draft) if is_loaded else backward


def _is_place(part: Draft) -> bool:
    """Whether a part of a concatenation is in memory whatever reads it, in both graphs: then it is written where it belongs."""
    return part.kernel != POINTWISE or (part.is_materialised and part.is_written_again)


def _has_places(draft: Draft, graph: DraftGraph, rules: InductorRules) -> bool:
    """Whether a concatenation on a GPU has parts that are buffers: all of them, or one that others read, too."""
    if all(s.kernel != POINTWISE for s in draft.sources):
        return True
    if not rules.concatenates_shared:
        return False
    is_written = any(graph.by_node[u].kernel == EXTERN for u in draft.node.users if u in graph.by_node)
    return is_written and any(s.kernel == POINTWISE and most_users(s.node) > 1 for s in draft.sources)


def is_fused_scatter(node: fx.Node, rules: InductorRules) -> bool:
    """Whether Inductor writes elements into a copy of the node's first argument by a kernel of its own."""
    value, name = node.meta.get("val"), getattr(node.target, "__name__", "").split(".")[0]
    if name not in rules.scatters or not isinstance(value, torch.Tensor):
        return False
    indices = [i.meta.get("val") for i in node.all_input_nodes if name != "_unsafe_masked_index_put_accumulate"]
    by_mask = any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
    return value.dtype not in rules.unfused_scatter_dtypes and not by_mask


def _load_of(draft: Draft) -> Expression:
    return Expression(reads=frozenset({draft.node.name}))


def is_variance(node: fx.Node) -> bool:
    """Whether a node is a variance, on its own or beside the mean.

    Inductor writes the sum of the squared distances to memory, and each reader divides it (``var_mean_welford_`` in
    ``lowering.py``).
    """
    if node.target is operator.getitem and node.args[1:] == (0,):
        return _packet(node.args[0]) is aten.var_mean
    return _packet(node) is aten.var


def _packet(node: object) -> object:
    return getattr(node.target, "overloadpacket", None) if isinstance(node, fx.Node) else None


def _scaled(draft: Draft) -> Expression:
    """A load and its division by ``maximum(0, elements - correction)``."""
    node = draft.node.args[0] if draft.node.target is operator.getitem else draft.node
    assert isinstance(node, fx.Node)
    sizes, dims = shape(node.all_input_nodes[0]), reduced_dims(node)
    num_reduced = math.prod(size for dim, size in enumerate(sizes) if not dims or dim in dims)
    steps = ((draft.node.name, k) for k in ("subtract", "maximum", "divide"))
    dtype = computed_dtype(node)
    numbers = (_number(number, dtype) for number in (0, num_reduced, node.kwargs.get("correction", 1)))
    return Expression(frozenset({draft.node.name}), frozenset({*steps, *numbers}))


def joined(draft: Draft, parts: Sequence[Expression]) -> Expression:
    """A draft's expression, made of its own operations and of the expressions of what it reads."""
    own, inner_ops = draft.own_expression, frozenset[object]().union(*(p.ops for p in parts))
    reads = own.reads.union(*(p.reads for p in parts))
    more = range(1, draft.num_unrolled)  # of what each other element is computed
    ops = own.ops.union(inner_ops, {(op, k) for op in inner_ops if not isinstance(op, _Number) for k in more})
    has_heavy = own.has_heavy or any(p.has_heavy for p in parts)
    return Expression(reads.union({(read, k) for read in reads for k in more}), ops, has_heavy)


def as_taken(source: Draft, expression: Expression, by: Draft) -> Expression:
    """The expression of what a node reads, and the same at another index for each further view of it that the node reads."""
    more = by.further_views.get(source.node, 0)
    if not more:
        return expression
    ops, reads = expression.ops, expression.reads
    at_others = range(-1, -1 - more, -1)
    return Expression(
        reads.union({(read, k) for read in reads for k in at_others}),
        ops.union({(op, k) for op in ops if not isinstance(op, _Number) for k in at_others}),
        expression.has_heavy,
    )


def _further_views(draft: Draft) -> dict[fx.Node, int]:
    """`Draft.further_views`: an enlarged picture is read at one list of places, as rows and as columns."""
    inputs = [node for node in draft.node.all_input_nodes if node.target is not aten.expand.default]
    if len(inputs) < 2:
        return {}
    views = Counter(map(root_of, inputs))
    return {node: number - 1 for node, number in views.items() if number > 1}


def _own_expression(draft: Draft, rules: InductorRules) -> Expression:
    reads = frozenset(name for name, _ in draft.input_reads)
    return Expression(reads, frozenset(_own_ops(draft, rules)), _name(draft) in rules.heavy_ops)


def _name(draft: Draft) -> str:
    target = draft.op.target
    return target.split(".")[1] if "." in target else target


def _own_ops(draft: Draft, rules: InductorRules) -> Iterator[object]:
    """One for each operation beside the loads; equal numbers of one type are one, whoever computes with them, and so are casts."""
    own_numbers = OWN_NUMBERS.get(_name(draft), ())
    yield from (_number(*own) for own in own_numbers)
    num_ops = (
        draft.num_unrolled - 1 + (_name(draft) == "mean") if draft.num_unrolled else int(not is_spare_cast(draft.node))
    )
    for k in range(num_ops + dict(rules.extra_ops).get(_name(draft), 0) - len(own_numbers)):
        yield draft.node.name, k
    dtype = computed_dtype(draft.node)
    for number in numbers_of(draft.node):
        yield _number(number, dtype)
    for source in promoted_inputs(draft.node):
        yield source.name, dtype


def _number(number: object, dtype: torch.dtype | None) -> _Number:
    """A number as an operation: Inductor compares constants by their text, so 0 and 0.0 are two."""
    return _Number(str(number), dtype)


def _constant(node: fx.Node) -> object:
    """A constant as an operation: one number everywhere is that number, anything else an operation of its own."""
    value = node.meta.get("val")
    if node.target not in FILLS or not isinstance(value, torch.Tensor):
        return node.name
    numbers = list(numbers_of(node))
    return _number(numbers[0], value.dtype) if len(numbers) == 1 else node.name  # none where it is a size or an item


def _operands_of(draft: Draft) -> tuple[Draft, ...]:
    """The sources whose elements a node's expression takes: a pooling's gradient asks the pooling's input for its size alone."""
    given = draft.node.args[1] if draft.node.target in POOLINGS else None
    return tuple(s for s in draft.sources if s.kernel != CONSTANT or s.node is not given)


def is_written(expression: Expression, is_reused: bool, rules: InductorRules) -> bool:
    return _has_many_reads(expression, is_reused, rules) or _is_large(expression, is_reused, rules)


def _has_many_reads(expression: Expression, is_reused: bool, rules: InductorRules) -> bool:
    num_reads = len(expression.reads)
    return num_reads > rules.max_reads or (
        is_reused and (num_reads > rules.max_reads_if_reused or expression.has_heavy)
    )


def _is_large(expression: Expression, is_reused: bool, rules: InductorRules) -> bool:
    """``Loops.has_large_inner_fn`` as ``GraphLowering.run_node`` asks for it: a load is an operation, too."""
    num_ops = _num_ops(expression)
    return num_ops > rules.max_ops and (is_reused or len(expression.reads) > 1 or num_ops > LARGE_FOR_ALL)


def _num_ops(expression: Expression) -> int:
    return len(expression.reads) + len(expression.ops)


def _spared_ops(draft: Draft) -> dict[Draft, int]:
    """For each value in a step's expression, how many operations there are less where it is read from memory."""
    inlined: dict[Draft, None] = {}
    stack = [draft]
    while stack:
        for source in stack.pop().sources:
            if source not in inlined and (_is_inlined(source) or is_variance(source.node)):
                inlined[source] = None
                stack += [source] if _is_inlined(source) else []
    num_ops = _num_ops(_with_load_of(None, draft))
    spared = {p: num_ops - _num_ops(_with_load_of(p, draft)) for p in inlined if not p.in_backward}
    return {part: ops for part, ops in spared.items() if ops > 0}


def _is_inlined(source: Draft) -> bool:
    return source.kernel == POINTWISE and source.node.name not in source.backward_expression.reads


def _with_load_of(part: Draft | None, draft: Draft) -> Expression:
    """A draft's expression in the backward where one part of it is read from memory."""
    found = [] if part is None else [_load_of(part)]
    seen, stack = {part, draft}, [draft]
    while stack:
        node = stack.pop()
        new = [source for source in _operands_of(node) if source not in seen]
        seen.update(new)
        stack += filter(_is_inlined, new)
        found.append(joined(node, [as_taken(s, s.backward_expression, node) for s in new if not _is_inlined(s)]))
    return Expression(frozenset().union(*(e.reads for e in found)), frozenset().union(*(e.ops for e in found)))


def loaded_by(draft: Draft) -> list[Draft]:
    """What a node's kernel reads from memory in the forward, through what is computed in its expression."""
    found, stack = dict[Draft, None](), [*draft.sources]
    while stack:
        source = stack.pop()
        if source in found:
            continue
        if source.kernel == POINTWISE and not (source.is_drawn or source.is_materialised or source.is_output):
            stack += source.sources
        else:
            found[source] = None
    return list(found)


def mark_written_constants(graph: DraftGraph) -> None:
    """A constant that an unfused kernel reads is written to memory like any other value: saving it spares that."""
    for draft in graph.by_node.values():
        if draft.kernel == EXTERN:
            for source in draft.sources:
                if source.kernel == CONSTANT:
                    source.kernel = POINTWISE


def without_start(draft: Draft) -> tuple[Draft, ...]:
    """The sources of a node, without the zeros that a called scatter starts from: Inductor computes them where it scatters."""
    copied = _copied(draft) if draft.kernel == EXTERN else None
    return tuple(s for s in draft.sources if s.kernel != CONSTANT or s.node is not copied)


def _copied(draft: Draft) -> fx.Node | None:
    """What an unfused scatter starts from, where it reads that for nothing else."""
    if _name(draft) not in COPYING:
        return None
    start, *others = (root_of(node) for node in _operands(draft.node))
    return start if start not in others else None


def _operands(node: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments, in their order, each as often as it stands there."""
    return [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


def drop_inner_buffers(graph: DraftGraph) -> None:
    """A materialised value whose readers all lie in its own fused kernel is never allocated, but for `cat` and `addmm`.

    What the forward computes and one fused kernel of the backward alone reads is computed there where it is not saved.  With
    other readers it may be computed again right before those, and all of that by one kernel if it is pointwise and has as many
    elements.  The plan decides that (`Value.is_inner`).  What only the forward's readers have written is no node of its own in the
    backward.
    """
    depths = _depths(graph)
    reading = _reading_kernels(depths, graph)
    for draft, kernels in reading.items():
        draft.is_drawn_apart = draft.is_drawn and _is_drawn_apart(draft, kernels, graph)
    if graph.saved is not None:
        _mark_otherwise_again(graph, reading)
    for draft, depth in depths.items():
        if draft.concatenates or draft.becomes_addmm:
            draft.is_materialised = True
        elif draft.is_materialised:
            kernels = reading[draft]
            is_for_one = _are_one(draft, kernels, graph) and all(k.in_backward for k in kernels)
            is_own = all(k.depth == depth for k in kernels) or (is_for_one and not draft.in_backward)
            is_own = is_own and not any(_is_apart(k, draft, graph) for k in kernels)
            is_alike = _are_alike(draft, kernels) and not draft.in_backward and draft.is_materialised_again is None
            if not graph.rules_of(draft.node).gives_others_loops:
                if draft.in_backward and _goes_over_groups(draft):
                    is_own = draft.is_channels_last = False
                elif _keeps_its_loops(draft):
                    is_own = is_alike = False
            draft.is_materialised = not is_own
            draft.is_inner = draft.is_written_again if is_own else is_alike


def _mark_otherwise_again(graph: DraftGraph, reading: Mapping[Draft, Collection[_Kernel]]) -> None:
    """Find the values that one of the two graphs of a plan writes to memory, and the other computes in their readers' kernels.

    A sum of four products is one expression in the backward that has the first of them from the forward; what is computed of the
    sum then reads five buffers.  In the forward, where the sum is of more and was written, it reads two.
    """
    for draft in graph.values:
        if draft.kernel != POINTWISE or draft.concatenates or draft.becomes_addmm or draft.is_drawn:
            continue
        if draft.is_materialised == draft.is_written_again or draft.node not in graph.run_again:
            continue
        kernels = reading[draft]
        draft.is_materialised_again = draft.is_written_again and not _are_one(draft, kernels, graph)
        draft.is_inner = draft.is_written_again and (_are_one(draft, kernels, graph) or _are_alike(draft, kernels))


def _are_one(draft: Draft, kernels: Collection[_Kernel], graph: DraftGraph) -> bool:
    """Whether a value's readers may be one fused kernel, with what they read."""
    is_apart = any(k.depth == NEVER_FUSED or _is_apart(k, draft, graph) for k in kernels)
    return len({k.depth for k in kernels}) == 1 and not is_apart


def _is_apart(kernel: _Kernel, draft: Draft, graph: DraftGraph) -> bool:
    """Whether a kernel cannot have the loops that compute a value: it sums in another order, or takes a part, as of a slice."""
    has_others = kernel.loops is _Loops.OTHERS and not graph.rules_of(draft.node).reorders_loops
    return kernel.is_split or has_others or 0 < kernel.num_elements < _num_elements(draft)


def _are_alike(draft: Draft, kernels: Collection[_Kernel]) -> bool:
    """Whether readers are fused kernels that go over as many elements as a pointwise value has."""
    return all(k.depth != NEVER_FUSED and k.num_elements == _num_elements(draft) for k in kernels)


def _keeps_its_loops(draft: Draft) -> bool:
    """Whether a node goes over rows and columns: its loops are not those of one that goes over pixels.

    It reads a picture at rows and columns that it looks up, or computes the gradient of a pooling of averages, whose index divides
    them.  In the backward, it may read tensors in both orders of dimensions and be written with its channels innermost: Inductor
    then goes over the dimensions in their order, and what reads the node alone over all of them at once.
    """
    orders = set[bool]()
    for source in _inlined_by(draft):
        if _name(source) in ("avg_pool2d_backward", "_unsafe_index", "index") and len(shape(source.node)) == 4:
            return True
        same = [s for s in source.sources if not _is_inlined(s) and shape(s.node) == shape(draft.node)]
        orders.update(s.is_channels_last for s in same)
    return draft.in_backward and draft.is_channels_last and len(orders) > 1


def _goes_over_groups(draft: Draft) -> bool:
    """Whether a node goes over groups of channels and reads tensors with their channels innermost: a group norm's gradient.

    Inductor writes it with neither the pixels nor all channels innermost: no other kernel has its loops, and it does not lie in
    the place of what it reads.
    """
    sources = [s for node in _inlined_by(draft) for s in node.sources if not _is_inlined(s)]
    of_all = [s for s in sources if s.is_channels_last and _num_elements(s) == _num_elements(draft)]
    return any(shape(s.node) != shape(draft.node) for s in of_all)


def _inlined_by(draft: Draft) -> list[Draft]:
    """A node, and what is computed in its expression."""
    found = {draft: None}
    stack = [draft]
    while stack:
        new = [s for s in stack.pop().sources if s not in found and _is_inlined(s)]
        found.update(dict.fromkeys(new))
        stack += new
    return list(found)


def _depths(graph: DraftGraph) -> dict[Draft, int]:
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


def _is_drawn_apart(draft: Draft, kernels: Collection[_Kernel], graph: DraftGraph) -> bool:
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


class _Kernel(NamedTuple):
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


def _reading_kernels(of: Mapping[Draft, int], graph: DraftGraph) -> dict[Draft, set[_Kernel]]:
    """The kernels that read each node, by their depths, NEVER_FUSED for unfused ones.

    A reader that stays in registers is part of its own readers' kernels, which may run much later: the state of a
    recurrent cell is read through two products by the next step's kernel.
    """
    kernels: dict[Draft, set[_Kernel]] = {draft: set() for draft in of}
    for draft in reversed(kernels):
        found = kernels[draft]
        is_in_registers = draft.kernel == POINTWISE and not (draft.is_materialised or draft.is_output)
        if draft.kernel == EXTERN or draft.becomes_addmm or draft.node.target is PACK_BITS:
            here = {_Kernel(NEVER_FUSED, draft.in_backward, 0)}
        elif is_in_registers and found and all(kernel.depth != NEVER_FUSED for kernel in found):
            here = found
        else:
            runs_again = (not draft.is_output and draft.node in graph.run_again) or draft.in_backward
            loops = _loops(draft, graph)
            is_split = _is_split(draft, graph)
            here = {_Kernel(of[draft], draft.in_backward, _num_elements(draft), is_split, runs_again, loops)}
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
    sizes, stack, seen = {1, _elements_reduced(draft)}, [draft], {draft}
    while stack:
        node = stack.pop()
        if any(math.prod(shape(operand)) not in sizes for operand in node.node.all_input_nodes):
            return _Loops.LAST
        inlined = [source for source in node.sources if source not in seen and _is_inlined(source)]
        seen.update(inlined)
        stack += inlined
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
