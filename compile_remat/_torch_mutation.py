"""Inputs that a joint graph's forward overwrites, and what its backward still wants of their old values.

Imports nothing of ours.  Same in torch 2.11, 2.13 and 2.15: functionalised joint graphs mutate by ``aten.copy_`` at the
very end, or leave it to the runtime and say so in the outputs' descriptors.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef


def mutated_inputs(module: fx.GraphModule) -> set[fx.Node]:
    """Inputs that the program mutates: by the outputs' descriptors, and as destination of an ``aten.copy_``."""
    placeholders = module.graph.find_nodes(op="placeholder")
    output = next(iter(reversed(module.graph.nodes)))
    mutated = [getattr(desc, "mutated_input", None) for desc in output.meta.get("desc") or ()]
    mutated = [desc for desc in mutated if desc is not None]
    copies = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    found = {node for node in placeholders if node.meta.get("desc") in mutated}
    return found | {node.args[0] for node in copies}.intersection(placeholders)


def keep_overwritten(module: fx.GraphModule, tangents_closure: Collection[fx.Node]) -> bool:
    """Give the backward a copy of each overwritten input that it reads directly; True where there was one.

    Autograd refuses to save such an input, so the program made a copy of its own.  Inductor's joint passes remove that as
    an operation without effect (``remove_noop_ops``), and the backward would read what the input holds by then.
    """
    overwritten, copies = _overwritten_by_forward(module), dict[fx.Node, fx.Node]()
    if not overwritten:
        return False
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        sources = [source for source in node.all_input_nodes if source in overwritten]
        if node not in tangents_closure:
            overwritten |= {node} if any(_is_alias(node, source) for source in sources) else set()
        elif not _is_mutable(node):
            for source in sources:
                if source not in copies:
                    copies[source] = _copy_of(source, module.graph)
                node.replace_input_with(source, copies[source])
    if copies:
        module.recompile()
    return bool(copies)


def _overwritten_by_forward(module: fx.GraphModule) -> set[fx.Node]:
    """Without those that only the backward overwrites: what it reads of them is what they hold by then."""
    in_backward = {
        node.args[0]
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
    }
    return mutated_inputs(module) - in_backward


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def _is_alias(node: fx.Node, source: fx.Node) -> bool:
    """By the operator, because passes leave a view's fake value where it was; by the values for what is a view at times."""
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
    place = graph.find_nodes(op="placeholder")[-1] if source.op == "placeholder" else source
    with graph.inserting_after(place):
        copy = graph.call_function(torch.ops.aten.clone.default, (source,))
    copy.meta = {name: value for name, value in source.meta.items() if name not in ("desc", "recompute")}
    copy.meta["val"] = torch.ops.aten.clone.default(source.meta["val"])
    return copy
