"""Counts of one FX node: its kind, its arithmetic and the bytes that it reads and writes.

All counts come from ``node.meta["val"]`` (fake tensors). No operator runs and no memory is allocated; symbolic sizes are
taken at their hints and no guard is added. `describe` is called once for each node of a joint graph, so it must stay
cheap: tens of microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from compile_remat._torch.operators import inner_graphs, is_complex
from compile_remat._torch.sizes import hint_int
from compile_remat.cost_models.operators import flops as flop_formulas
from compile_remat.cost_models.operators.kinds import (
    BYTES_SUFFICE,
    DROPOUT_POSITION,
    FUSED_KINDS,
    GATHERS,
    HEAVY_KINDS,
    MAYBE_VIEW,
    MOVES,
    RUNS_NO_KERNEL,
    OpKind,
    TargetFacts,
    target_facts,
)
from compile_remat.cost_models.operators.products import Product, product_of, visible_part

_storage_ref: Any = StorageWeakRef  # torch leaves it untyped
_SYMBOL_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@dataclass(frozen=True, slots=True)
class Op:
    """Counts of one node: bytes and operations.  A cost model turns them into time.

    Attributes:
        name: The node's name, e.g. ``mm_1``.
        target: The operator, e.g. ``aten.mm.default``.
        kind: The way in which the operator uses the device.
        dtype: Type of the arithmetic, e.g. ``float32``, ``bfloat16``, ``float8``; "" if there is no tensor.
        flops: Floating-point operations, a multiply-add counted as 2; elements times a small weight for pointwise and
            reduction operators; 0 for operators that only move data.
        read_bytes: Bytes read of the distinct tensor inputs: repeated elements of an expanded input count once, a slice
            counts its own elements only, and a gather no more than it takes. 0 if no kernel runs.
        write_bytes: Bytes of the outputs; 0 for VIEW, ITEM and SYMBOL.
        is_random: True if the operator draws from a generator, so that a second run would draw other numbers: torch's tag
            ``nondeterministic_seeded``, except on attention whose ``dropout_p`` is 0 (torch's own rule from 2.14 on).
        estimated: True if the operator is a kernel of its own and no formula counts its arithmetic: only bytes are priced.
        product: Lengths (batch, m, n, k) of the product that a heavy operator is priced as, see `products`; else None.
        visible: Part of `flops` that causal attention really computes; 1 for other operators.
    """

    name: str
    target: str
    kind: OpKind
    dtype: str
    flops: int
    read_bytes: int
    write_bytes: int
    is_random: bool
    estimated: bool
    product: Product | None = None
    visible: float = 1.0


def op_kind(node: fx.Node) -> OpKind:
    """Kind of the node; see `OpKind`."""
    return _facts_and_kind(node)[1]


def is_view(node: fx.Node) -> bool:
    """Returns whether the node is a view; faster than `op_kind`, because dtypes need not be checked."""
    return _facts_and_real_kind(node)[1] is OpKind.VIEW


def is_random(node: fx.Node) -> bool:
    """Returns whether the node draws from a random generator; see `Op`."""
    return node.op == "call_function" and _is_random(node, target_facts(node.target))


def describe(node: fx.Node) -> Op:
    """Counts of the node, from the fake values in its own ``meta["val"]`` and that of its inputs."""
    facts, kind = _facts_and_kind(node)
    value = node.meta.get("val")
    text = facts.text if facts is not None else str(node.target)
    if facts is None or kind in RUNS_NO_KERNEL:
        written = _written_bytes(value) if kind in (OpKind.INPUT, OpKind.CONSTANT) else 0
        return Op(node.name, text, kind, _dtype_of(value), 0, 0, written, _is_random(node, facts), False)
    inputs = [v for v in (n.meta.get("val") for n in node.all_input_nodes) if v is not None]
    flops, estimated = _flops(node, facts, kind, value, inputs)
    written = _written_bytes(value)
    operands = _convolution_operands(node) if facts.packet == "aten.convolution_backward" else inputs
    read = _read_bytes(operands, written if facts.packet in GATHERS else None)
    dtype = _arithmetic_dtype(kind, value, inputs)
    product = product_of(facts.packet, kind, node, value)
    visible = visible_part(facts.packet, node, product)
    is_random = _is_random(node, facts)
    return Op(node.name, text, kind, dtype, flops, read, written, is_random, estimated, product, visible)


def _facts_and_kind(node: fx.Node) -> tuple[TargetFacts | None, OpKind]:
    facts, kind = _facts_and_real_kind(node)
    return facts, OpKind.OTHER if kind in FUSED_KINDS and is_complex(node) else kind


def _facts_and_real_kind(node: fx.Node) -> tuple[TargetFacts | None, OpKind]:
    """Facts about the node's operator, and the node's kind under the assumption that no tensor is complex."""
    if node.op == "output":
        return None, OpKind.VIEW  # returns tensors and runs no kernel
    if isinstance(node.meta.get("val"), _SYMBOL_TYPES):
        return (target_facts(node.target) if node.op == "call_function" else None), OpKind.SYMBOL
    if node.op != "call_function":
        return None, OpKind.INPUT
    facts = target_facts(node.target)
    kind = facts.kind
    if facts.packet in MAYBE_VIEW:
        kind = OpKind.VIEW if _aliases_input(node) else OpKind.POINTWISE
    return facts, kind


def _is_random(node: fx.Node, facts: TargetFacts | None) -> bool:
    if facts is None or not facts.is_random:
        return False
    position = DROPOUT_POSITION.get(facts.packet)
    if position is None:
        return True
    given = node.args[position] if len(node.args) > position else node.kwargs.get("dropout_p", 0.0)
    return not (isinstance(given, int | float) and given == 0)


def _aliases_input(node: fx.Node) -> bool:
    """Returns whether the traced value shares its storage with the first input: then the operator was a view, else a copy."""
    source = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    if value.layout is not torch.strided or source.layout is not torch.strided:
        return False
    return bool(_storage_ref(value.untyped_storage()) == _storage_ref(source.untyped_storage()))


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _flops(node: fx.Node, facts: TargetFacts, kind: OpKind, value: Any, inputs: list[Any]) -> tuple[int, bool]:
    """Floating-point operations, and True if they are unknown."""
    kind = facts.kind if facts.kind in FUSED_KINDS else kind
    if kind in HEAVY_KINDS or kind is OpKind.OTHER:
        graphs = inner_graphs(node) if kind is OpKind.OTHER else []  # attention that calls graphs has a formula
        if graphs:
            trips = _trips(node)
            return trips * max(sum(describe(n).flops for n in g.graph.nodes) for g in graphs), trips == 0
        counted = flop_formulas.heavy_flops(node, facts.packet)
        return counted or 0, counted is None and facts.packet not in BYTES_SUFFICE
    if facts.packet in MOVES or facts.packet in MAYBE_VIEW:
        return 0, False
    elements = _elements(value)
    if kind is OpKind.REDUCTION:
        elements = max([elements, *(_elements(v) for v in inputs)])
    weight = flop_formulas.element_weight(facts.packet)
    if facts.packet == "aten.pow":
        weight = flop_formulas.pow_weight(node)
    return elements * weight, False


def _trips(node: fx.Node) -> int:
    """The number of times that an operator runs its graph; 0 if that depends on data (``while_loop``)."""
    if node.target is torch.ops.higher_order.scan:
        rows: Any = node.args[2]  # scan(body, initial, rows, more inputs)
        return hint_int(rows[0].meta["val"].shape[0])
    return 0 if node.target is torch.ops.higher_order.while_loop else 1


def _arithmetic_dtype(kind: OpKind, value: Any, inputs: list[Any]) -> str:
    """Dtype of a heavy operator's second tensor, because the first may be a bias; of other operators, of the first input."""
    tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
    if kind in HEAVY_KINDS and len(tensors) > 1:
        return _dtype_name(tensors[1].dtype)
    return _dtype_name(tensors[0].dtype) if tensors else _dtype_of(value)


def _dtype_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _dtype_name(value.dtype)
    if isinstance(value, list | tuple):
        return next((_dtype_name(v.dtype) for v in value if isinstance(v, torch.Tensor)), "")
    return ""


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


# -- sizes ------------------------------------------------------------------------------------------------------------


def _elements(value: Any) -> int:
    """Logical elements of a tensor, or the most of any tensor in a tuple."""
    if isinstance(value, torch.Tensor):
        return prod([s if type(s) is int else hint_int(s) for s in value.shape])
    if isinstance(value, list | tuple):
        return max((_elements(v) for v in value), default=0)
    return 0


def _written_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return _elements(value) * value.dtype.itemsize
    if isinstance(value, list | tuple):
        return sum(_written_bytes(v) for v in value)
    return 0


def _convolution_operands(node: fx.Node) -> list[Any]:
    """Tensors that the kernels of a convolution's backward read.

    The gradients of input and weight are a kernel each; the gradient of the bias alone is priced like the weight's.
    """
    operands: tuple[Any, ...] = node.args
    gradient, read, weight = (n.meta["val"] for n in operands[:3])
    of_input, of_weight, _ = operands[10]
    return [*([gradient, weight] if of_input else []), *([gradient, read] if of_weight or not of_input else [])]


def _read_bytes(inputs: list[Any], gathered: int | None) -> int:
    """Bytes read of the inputs; `gathered` caps the first tensor, of which a gather reads only as much as it writes."""
    total = 0
    for index, value in enumerate(inputs):
        nbytes = _touched_bytes(value)
        total += min(nbytes, gathered) if gathered is not None and index == 0 else nbytes
    return total


def _touched_bytes(value: Any) -> int:
    """Distinct bytes of a tensor: a dimension of stride 0 repeats the same elements."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return _elements(value) * value.dtype.itemsize
        elements = value.dtype.itemsize
        for size, stride in zip(value.shape, value.stride(), strict=True):
            if type(size) is not int:
                size = hint_int(size)
            # An empty tensor is empty whatever its strides; a symbolic stride comes from sizes and is never 0.
            if size == 0 or not (type(stride) is int and stride == 0):
                elements *= size
        return elements
    if isinstance(value, list | tuple):
        return sum(_touched_bytes(v) for v in value)
    return 0
