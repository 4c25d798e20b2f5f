"""What torch's operator overloads say of themselves: ``torch._ops.OpOverload`` with ``_schema``, the same in 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves as tree_leaves

from compile_remat._torch.version import private_name

OpOverload = private_name("torch._ops", "OpOverload")


def is_mutable(target: Any) -> bool:
    """Whether the target is an operator that writes into one of its arguments."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


def namespace_of(node: fx.Node) -> str | None:
    """The library of the node's operator, such as ``aten``; None for a Python function."""
    target: Any = node.target
    return str(target.namespace) if isinstance(target, OpOverload) else None


def inner_graphs(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator (``cond``, ``scan``, ``while_loop``) is called with; none for other operators."""
    owner = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    values = [attrgetter(name)(owner) for name in names]
    return [value for value in values if isinstance(value, fx.GraphModule)]


def numbers_of(node: fx.Node) -> Iterator[complex]:
    """The numbers that an operator computes with, such as the 2.0 of ``add(x, 2.0)``: no dimensions."""
    if not isinstance(node.target, OpOverload):
        return
    for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
        if isinstance(given, int | float | complex) and _takes_numbers(argument):
            yield given


def _takes_numbers(argument: Any) -> bool:
    return str(argument.type) in ("number", "Optional[number]", "Tensor")


_TALKS = ("c10d", "dtensor", "symm_mem", "fsdp", "distributed", "rpc")
"""Parts of the names of libraries whose operators wait for other processes."""


def can_run_alone(target: object) -> bool:
    """Whether a node's target is an operator that writes into nothing and waits for no other process."""
    return waits_for_nobody(target) and not is_mutable(target)


def waits_for_nobody(target: Any) -> bool:
    """Whether a node's target is an operator that runs in this process alone."""
    return isinstance(target, OpOverload) and not any(part in target.namespace for part in _TALKS)
