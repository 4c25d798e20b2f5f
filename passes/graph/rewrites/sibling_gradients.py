"""Sibling gradients: gradients that are computed from one gradient are computed next to each other.

For `y = silu(g) * u` autograd computes the gradient of `u`, multiplies it by two matrices, and only then computes the gradient of
`g`.  During these products the gradient of `y`, `g` and `u` are alive beside the gradient of `u`: four tensors of the hidden size.
The rewrite computes the gradient of `g` first: its kernel reuses the buffer of `u` in place, and the kernel of the gradient of `u`
that of the gradient of `y`.  Then two tensors are alive during the products.

The elementwise operators of the later gradient move to the place of the earlier gradient, but only if they are the last readers
of gradients that together are at least as large as their result: no step that the operators cross then has more bytes alive.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import fx

from compile_remat._torch.codegen_rules import write_where_it_stands
from compile_remat._torch.sizes import hint_shape, hint_strides, storage_nbytes
from compile_remat.cost_models import OpKind, op_kind
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.graph.views import readers_of

MOVABLE = frozenset({OpKind.POINTWISE, OpKind.VIEW, OpKind.CONSTANT, OpKind.SYMBOL})
LIBRARY = frozenset({OpKind.MATMUL, OpKind.CONV, OpKind.ATTENTION, OpKind.OTHER})

Kinds = Mapping[fx.Node, OpKind]


def make_sibling_gradients_together(module: fx.GraphModule, backward: Collection[fx.Node]) -> Rewritten:
    """Move the elementwise operators of a gradient in front of its sibling, and so of the products between the two.

    Args:
        module: A joint graph; its nodes are moved in place.
        backward: Nodes of `module` that depend on a tangent.

    Returns:
        The number of gradients that were moved.
    """
    kinds = {node: op_kind(node) for node in module.graph.nodes if node.op == "call_function"}
    library = [node for node in module.graph.nodes if node in backward and kinds.get(node) in LIBRARY]
    gradients = [node for node in module.graph.nodes if node in backward and _is_gradient(node, kinds)]
    moved = 0
    for node in list(gradients):
        last_product = bisect(library, node) - 1
        latest = _latest_source(node, kinds)
        begin = bisect(gradients, latest) if latest is not None else 0
        end = bisect(gradients, library[last_product]) if last_product >= 0 else 0
        sibling = _earliest_sibling(node, gradients[begin:end], kinds, backward) if begin < end else None
        if sibling is not None:
            gradients.remove(node)
            for part in _chain(node, sibling, kinds):
                sibling.prepend(part)
            insort(gradients, node)
            write_where_it_stands(node)
            write_where_it_stands(sibling)
            moved += 1
    if moved:
        module.recompile()
    return Rewritten(moved)


def _is_gradient(node: fx.Node, kinds: Kinds) -> bool:
    """Returns whether a node is an elementwise operator with a contiguous result that a matrix product reads."""
    if kinds.get(node) is not OpKind.POINTWISE or not any(
        kinds.get(r) is OpKind.MATMUL for r in readers_of(node, kinds.get)
    ):
        return False
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and _is_contiguous(value)


def _is_contiguous(value: torch.Tensor) -> bool:
    """Returns whether a tensor is contiguous; adds no guard."""
    expected = 1
    for size, stride in zip(reversed(hint_shape(value)), reversed(hint_strides(value)), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _latest_source(node: fx.Node, kinds: Kinds) -> fx.Node | None:
    """The last node in the graph's order that a node's chain of elementwise operators reads; None if there is none."""
    pending = sorted(node.all_input_nodes)
    while pending:
        latest = pending.pop()
        if kinds.get(latest) not in MOVABLE:
            return latest
        for source in latest.all_input_nodes:
            if source not in pending:
                insort(pending, source)
    return None


def _chain(end: fx.Node, place: fx.Node, kinds: Kinds) -> list[fx.Node]:
    """The elementwise operators after `place` from which `end` is computed, `end` included, in the graph's order."""
    found, pending = {end}, [end]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found and source > place and kinds.get(source) in MOVABLE:
                found.add(source)
                pending.append(source)
    return sorted(found)


def _earliest_sibling(
    node: fx.Node, gradients: Sequence[fx.Node], kinds: Kinds, backward: Collection[fx.Node]
) -> fx.Node | None:
    """The first of `gradients` in front of which `node` can be computed without raising the live bytes anywhere after it."""
    freed = []  # for each gradient that the node reads: its last other reader, its bytes
    for source in _in_memory(node, attrgetter("all_input_nodes"), kinds):
        if source in backward and source.op == "call_function":  # a tangent is the caller's
            others = _in_memory(source, attrgetter("users"), kinds) - {node}
            freed.append((max(others, default=source), _nbytes(source)))
    wanted = _nbytes(node)
    return next((g for g in gradients if sum(n for last, n in freed if last <= g) >= wanted), None)


def _in_memory(node: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]], kinds: Kinds) -> set[fx.Node]:
    """The buffers that a gradient's kernel reads, or the kernels that read a buffer, through nodes that stay in registers."""
    found, seen, pending = set[fx.Node](), {node}, [node]
    while pending:
        for other in neighbours(pending.pop()):
            if other in seen:
                continue
            seen.add(other)
            if _stays_in_registers(other, kinds):
                pending.append(other)
            else:
                found.add(other)
    return found


def _stays_in_registers(node: fx.Node, kinds: Kinds) -> bool:
    return kinds.get(node) in MOVABLE and not _is_gradient(node, kinds)


def _nbytes(node: fx.Node) -> int:
    return storage_nbytes(node.meta.get("val"))
