"""Inputs that a joint graph's forward overwrites, and copies of the old values that its backward reads.

Imports nothing of compile_remat but `operators`.  Same in torch 2.11, 2.13 and 2.15: functionalised joint graphs mutate inputs by
``aten.copy_`` at the very end, or leave the copy to the runtime and mark it in the outputs' descriptors.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.multiprocessing.reductions import StorageWeakRef

from compile_remat._torch.operators import call, is_mutable

PARTIAL_WRITES = frozenset(
    f"aten.{name}"
    for name in ("as_strided_scatter diagonal_scatter index_put _unsafe_index_put select_scatter slice_scatter".split())
)
"""Operators that write into a part of a copy of their first input.  If the program overwrites that input at its end,
Inductor writes into the input itself and makes no copy (``fx_passes/reinplace.py``, 2.13), even if the output is saved
and another value overwrites it later.  So the output is valid no longer than the input."""


def may_take_over(node: fx.Node, overwritten: Collection[fx.Node]) -> bool:
    """Returns whether the output of a node that reads one of `overwritten` may share the memory of that input."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    packet = str(getattr(node.target, "overloadpacket", ""))
    return packet in PARTIAL_WRITES and node.args[0] in overwritten


def mutated_inputs(module: fx.GraphModule) -> set[fx.Node]:
    """Inputs that the program mutates, according to the outputs' descriptors or as the destination of an ``aten.copy_``."""
    placeholders = module.graph.find_nodes(op="placeholder")
    output = next(iter(reversed(module.graph.nodes)))
    mutated = [getattr(desc, "mutated_input", None) for desc in output.meta.get("desc") or ()]
    mutated = [desc for desc in mutated if desc is not None]
    copies = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    found = {node for node in placeholders if node.meta.get("desc") in mutated}
    return found | {node.args[0] for node in copies}.intersection(placeholders)


def writes_in_place(module: fx.GraphModule) -> list[fx.Node]:
    """Nodes that mutate an argument, except for copies into inputs of the graph; a functional graph has none."""
    mutable = (n for n in module.graph.nodes if n.op == "call_function" and is_mutable(n.target))
    return [n for n in mutable if n.target not in _INTO_INPUTS or n.all_input_nodes[0].op != "placeholder"]


_INTO_INPUTS = (torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor)


def keep_overwritten(module: fx.GraphModule, tangents_closure: Collection[fx.Node]) -> bool:
    """Give the backward a copy of each overwritten value that it reads directly; returns True if it reads one.

    Autograd refuses to save an overwritten value, so the program copies it.  Inductor's joint passes remove this copy as
    an operation without effect (``remove_noop_ops``), and the backward would read the overwritten memory.  Overwritten
    values are mutated inputs, aliases of these, and results of partial writes into these.
    """
    overwritten, copies = _overwritten_by_forward(module), dict[fx.Node, fx.Node]()
    if not overwritten:
        return False
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        sources = [source for source in node.all_input_nodes if source in overwritten]
        if node not in tangents_closure:
            is_short_lived = any(_is_alias(node, source) for source in sources) or may_take_over(node, overwritten)
            overwritten |= {node} if sources and is_short_lived else set()
        elif not is_mutable(node.target):
            for source in sources:
                if not isinstance(source.meta.get("val"), torch.Tensor):
                    continue  # several outputs: their getitem nodes are copied instead
                if source not in copies:
                    copies[source] = _copy_of(source, module.graph)
                node.replace_input_with(source, copies[source])
    if copies:
        module.recompile()
    return bool(copies)


def _overwritten_by_forward(module: fx.GraphModule) -> set[fx.Node]:
    """Mutated inputs, except for inputs that the backward overwrites: the backward reads their new values."""
    in_backward = {
        node.args[0]
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
    }
    return mutated_inputs(module) - in_backward


def _is_alias(node: fx.Node, source: fx.Node) -> bool:
    """Returns whether `node` aliases `source`: by operator, since passes do not refresh a view's fake tensor, else by storage."""
    if node.target is operator.getitem or getattr(node.target, "is_view", False):
        return True
    own, other = _storage(node), _storage(source)
    return own is not None and other is not None and bool(own == other)


def _storage(node: fx.Node) -> StorageWeakRef | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())


def _copy_of(source: fx.Node, graph: fx.Graph) -> fx.Node:
    """Insert a copy that Inductor's passes keep: a clone of an input, or a `where` of another value, whose clone they remove."""
    value = source.meta["val"]
    if source.op == "placeholder":
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            return _call(graph, source, torch.ops.aten.clone.default, source)
    with graph.inserting_after(source):
        true = _call(graph, source, torch.ops.aten.full.default, [], True, dtype=torch.bool, device=value.device)
    with graph.inserting_after(true):
        return _call(graph, source, torch.ops.aten.where.self, true, source, source)


def _call(graph: fx.Graph, source: fx.Node, target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    with detect_fake_mode([source.meta["val"]]) or nullcontext():
        node = call(graph, target, args, kwargs)
    kept = {name: value for name, value in source.meta.items() if name not in ("desc", "recompute")}
    node.meta = {**kept, "val": node.meta["val"]}
    return node
