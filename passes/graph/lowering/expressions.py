"""What is computed inside of fused kernels: the loads and operations of each node, as Inductor counts them."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx

from compile_remat._torch.codegen_rules import OWN_NUMBERS, InductorRules
from compile_remat._torch.operators import computed_dtype, is_spare_cast, numbers_of, promoted_inputs, reduced_dims
from compile_remat.passes.graph.node_drafts import Draft, Expression
from compile_remat.passes.graph.rewrites.shape_only_inputs import POOLINGS
from compile_remat.passes.graph.views import root_of, shape
from compile_remat.passes.problem.problem import CONSTANT, POINTWISE

aten = torch.ops.aten

LARGE_FOR_ALL = 100
"""An expression with more operations is materialised even if it reads one buffer (``GraphLowering.run_node``)."""

FILLS = (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)
"""Constants that are one number everywhere."""


class _Number(NamedTuple):
    """A number as an operation."""

    text: str
    dtype: torch.dtype | None


def load_of(draft: Draft) -> Expression:
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


def scaled_variance(draft: Draft) -> Expression:
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
    own, ops = draft.own_expression, frozenset[object]().union(*(p.ops for p in parts))
    has_heavy = own.has_heavy or any(p.has_heavy for p in parts)
    inner = Expression(own.reads.union(*(p.reads for p in parts)), ops, has_heavy)
    inner = _repeated(inner, range(1, draft.num_unrolled))  # of what each other element is computed
    return Expression(inner.reads, own.ops | inner.ops, has_heavy)


def as_taken(source: Draft, expression: Expression, by: Draft) -> Expression:
    """The expression of what a node reads, and the same at another index for each further view of it that the node reads."""
    return _repeated(expression, range(-1, -1 - by.further_views.get(source.node, 0), -1))


def _repeated(expression: Expression, indices: range) -> Expression:
    """An expression, and the same at other indices; numbers are the same everywhere."""
    if not indices:
        return expression
    reads, ops = expression.reads, expression.ops
    return Expression(
        reads.union({(read, k) for read in reads for k in indices}),
        ops.union({(op, k) for op in ops if not isinstance(op, _Number) for k in indices}),
        expression.has_heavy,
    )


def further_views(draft: Draft) -> dict[fx.Node, int]:
    """`Draft.further_views`: an enlarged picture is read at one list of places, as rows and as columns."""
    inputs = [node for node in draft.node.all_input_nodes if node.target is not aten.expand.default]
    if len(inputs) < 2:
        return {}
    views = Counter(map(root_of, inputs))
    return {node: number - 1 for node, number in views.items() if number > 1}


def own_expression(draft: Draft, rules: InductorRules) -> Expression:
    reads = frozenset(name for name, _ in draft.input_reads)
    return Expression(reads, frozenset(_own_ops(draft, rules)), op_name(draft) in rules.heavy_ops)


def op_name(draft: Draft) -> str:
    target = draft.op.target
    return target.split(".")[1] if "." in target else target


def _own_ops(draft: Draft, rules: InductorRules) -> Iterator[object]:
    """One for each operation beside the loads; equal numbers of one type are one, whoever computes with them, and so are casts."""
    own_numbers = OWN_NUMBERS.get(op_name(draft), ())
    yield from (_number(*own) for own in own_numbers)
    num_ops = int(not is_spare_cast(draft.node))
    if draft.num_unrolled:
        num_ops = draft.num_unrolled - 1 + (op_name(draft) == "mean")
    for k in range(num_ops + dict(rules.extra_ops).get(op_name(draft), 0) - len(own_numbers)):
        yield draft.node.name, k
    dtype = computed_dtype(draft.node)
    for number in numbers_of(draft.node):
        yield _number(number, dtype)
    for source in promoted_inputs(draft.node):
        yield source.name, dtype


def _number(number: object, dtype: torch.dtype | None) -> _Number:
    """A number as an operation: Inductor compares constants by their text, so 0 and 0.0 are two."""
    return _Number(str(number), dtype)


def constant_op(node: fx.Node) -> object:
    """A constant as an operation: one number everywhere is that number, anything else an operation of its own."""
    value = node.meta.get("val")
    if node.target not in FILLS or not isinstance(value, torch.Tensor):
        return node.name
    numbers = list(numbers_of(node))
    return _number(numbers[0], value.dtype) if len(numbers) == 1 else node.name  # none where it is a size or an item


def operands_of(draft: Draft) -> tuple[Draft, ...]:
    """The sources whose elements a node's expression takes: a pooling's gradient asks the pooling's input for its size alone."""
    given = draft.node.args[1] if draft.node.target in POOLINGS else None
    return tuple(s for s in draft.sources if s.kernel != CONSTANT or s.node is not given)


def is_written(expression: Expression, is_reused: bool, rules: InductorRules) -> bool:
    return has_many_reads(expression, is_reused, rules) or _is_large(expression, is_reused, rules)


def has_many_reads(expression: Expression, is_reused: bool, rules: InductorRules) -> bool:
    num_reads = len(expression.reads)
    return num_reads > rules.max_reads or (
        is_reused and (num_reads > rules.max_reads_if_reused or expression.has_heavy)
    )


def _is_large(expression: Expression, is_reused: bool, rules: InductorRules) -> bool:
    """``Loops.has_large_inner_fn`` as ``GraphLowering.run_node`` asks for it: a load is an operation, too."""
    num_ops = ops_in(expression)
    return num_ops > rules.max_ops and (is_reused or len(expression.reads) > 1 or num_ops > LARGE_FOR_ALL)


def ops_in(expression: Expression) -> int:
    return len(expression.reads) + len(expression.ops)


def is_inlined(source: Draft) -> bool:
    return source.kernel == POINTWISE and source.node.name not in source.backward_expression.reads
