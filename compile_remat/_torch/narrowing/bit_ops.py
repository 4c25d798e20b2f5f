"""Two operators: one packs a bool tensor into bits, the other gives the bool tensor back.

In a joint graph that is planned, each is one node.  In the forward and the backward that are made of a plan, `expand_bit_ops`
writes them in operators that every backend fuses: Inductor never sees these two.

The bits of a byte do not come from neighbours.  With m bytes, bit k of byte j is element ``k * m + j`` of the tensor, in the order
of its memory.  So both directions go over contiguous bytes with one shift for each eighth of the tensor, which C++ vectorises and
Triton coalesces.  m is a multiple of 64, which keeps each eighth aligned; bits behind the last element are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compile_remat._torch.delivery.delivery_ops import NAMESPACE

BITS = 8
ALIGNED_BYTES = 64

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("pack_bits(Tensor value, int[] order) -> Tensor")
_LIBRARY.define("unpack_bits(Tensor bits, int[] shape, int[] order) -> Tensor")

PACK_BITS: Any = torch.ops.compile_remat.pack_bits.default
UNPACK_BITS: Any = torch.ops.compile_remat.unpack_bits.default

Call = Callable[..., Any]
"""Calls an operator on tensors, or makes a node that does."""

aten, prims = torch.ops.aten, torch.ops.prims


def num_bytes(num_elements: int) -> int:
    """Bytes of so many packed elements."""
    return -(-num_elements // (BITS * ALIGNED_BYTES)) * ALIGNED_BYTES


def _packed(call: Call, value: Any, shape: Sequence[int], device: torch.device, order: Sequence[int]) -> Any:
    """``uint8[m]`` of a bool tensor.

    Args:
        order: Its dimensions, the outermost in memory first.
    """
    n, m = math.prod(shape), num_bytes(math.prod(shape))
    if list(order) != sorted(order):
        value = call(aten.permute.default, value, list(order))
    numbers = call(prims.convert_element_type.default, value, torch.int32)
    numbers = call(aten.reshape.default, numbers, [n])
    if BITS * m != n:
        numbers = call(aten.constant_pad_nd.default, numbers, [0, BITS * m - n])
    numbers = call(aten.reshape.default, numbers, [BITS, m])
    shifted = call(aten.bitwise_left_shift.Tensor, numbers, _shifts(call, device))
    total = call(aten.sum.dim_IntList, shifted, [0], dtype=torch.int32)
    return call(prims.convert_element_type.default, total, torch.uint8)


def _unpacked(call: Call, bits: Any, device: torch.device, shape: Sequence[int], order: Sequence[int]) -> Any:
    """The bool tensor of this shape that was packed in this order."""
    n, m = math.prod(shape), num_bytes(math.prod(shape))
    numbers = call(prims.convert_element_type.default, bits, torch.int32)
    numbers = call(aten.reshape.default, numbers, [1, m])
    shifted = call(aten.bitwise_right_shift.Tensor, numbers, _shifts(call, device))
    value = call(aten.ne.Scalar, call(aten.bitwise_and.Scalar, shifted, 1), 0)
    value = call(aten.reshape.default, value, [BITS * m])
    if BITS * m != n:
        value = call(aten.slice.Tensor, value, 0, 0, n)
    value = call(aten.reshape.default, value, [shape[d] for d in order])
    if list(order) == sorted(order):
        return value
    return call(aten.permute.default, value, [list(order).index(d) for d in range(len(order))])


def _shifts(call: Call, device: torch.device) -> Any:
    numbers = call(prims.iota.default, BITS, start=0, step=1, dtype=torch.int32, device=device, requires_grad=False)
    return call(aten.reshape.default, numbers, [BITS, 1])


def _now(target: Any, *arguments: Any, **keywords: Any) -> Any:
    return target(*arguments, **keywords)


def packed_bits(value: Tensor, order: Sequence[int]) -> Tensor:
    """`PACK_BITS` in operators that every backend fuses."""
    packed: Tensor = _packed(_now, value, value.shape, value.device, order)
    return packed


def unpacked_bits(bits: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """`UNPACK_BITS` in operators that every backend fuses."""
    value: Tensor = _unpacked(_now, bits, bits.device, shape, order)
    return value


_LIBRARY.impl("pack_bits", packed_bits, "CompositeExplicitAutograd")
_LIBRARY.impl("unpack_bits", unpacked_bits, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::pack_bits", packed_bits, lib=_LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::unpack_bits", unpacked_bits, lib=_LIBRARY)


def expand_bit_ops(module: fx.GraphModule) -> None:
    """Write both operators, in place, in those that they are made of."""
    graph = module.graph
    nodes = [*graph.find_nodes(op="call_function", target=PACK_BITS)]
    nodes += graph.find_nodes(op="call_function", target=UNPACK_BITS)
    for node in nodes:
        given, *rest = node.args
        value = given.meta["val"]
        call = _maker(node)
        with graph.inserting_before(node):
            if node.target is PACK_BITS:
                made = _packed(call, given, value.shape, value.device, *rest)
            else:
                made = _unpacked(call, given, value.device, *rest)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        made.name = node.name  # reports know what is saved by its name
    if nodes:
        module.recompile()


def _maker(node: fx.Node) -> Call:
    """Makes nodes where the graph inserts them, with fake values, and what else is known of `node`."""
    mode = node.meta["val"].fake_mode

    def call(target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        made = node.graph.call_function(target, arguments, keywords)
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments]
        with mode:
            made.meta = {**node.meta, "val": target(*values, **keywords)}
        return made

    return call
