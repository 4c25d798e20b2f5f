"""Facts about torch's operator overloads, and calls of these without the contents of their tensors.

Private names, the same in 2.11 to 2.15: ``torch._ops.OpOverload`` with ``_schema``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

from compile_remat._torch import sizes
from compile_remat._torch.version import private_name

OpOverload = private_name("torch._ops", "OpOverload")


def is_mutable(target: Any) -> bool:
    """Returns whether the target is an operator that mutates one of its arguments."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


def namespace_of(node: fx.Node) -> str | None:
    """Returns the namespace of the node's operator, such as ``aten``; None for a Python function."""
    target: Any = node.target
    return str(target.namespace) if isinstance(target, OpOverload) else None


def is_complex(node: fx.Node) -> bool:
    """Returns whether a node reads or writes complex tensors; Inductor calls ATen (``fallback_node_due_to_unsupported_type``)."""
    if _holds_complex(node.meta.get("val")):
        return True
    for read in node.all_input_nodes:  # a loop, as this function runs many times for every pointwise node
        if _holds_complex(read.meta.get("val")):
            return True
    return False


def _holds_complex(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype.is_complex
    return isinstance(value, list | tuple) and any(map(_holds_complex, value))


def reduced_dims(node: fx.Node) -> frozenset[int]:
    """Returns the dimensions in a reduction's argument ``dim``; empty if it names none, and so reduces all of them."""
    if not isinstance(node.target, OpOverload):
        return frozenset()
    names = [argument.name for argument in node.target._schema.arguments]
    dims: Any = (dict(zip(names, node.args, strict=False)) | node.kwargs).get("dim")
    ndim = node.all_input_nodes[0].meta["val"].dim()
    return frozenset(d % ndim for d in (dims if isinstance(dims, list | tuple) else [] if dims is None else [dims]))


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    """Append a call to `graph`, with the fake tensor that its operator returns as ``meta["val"]``."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    given: Any = fx.map_arg((args, dict(kwargs or {})), lambda n: n.meta["val"])
    node.meta["val"] = target(*given[0], **given[1])
    return node


def inner_graphs(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the subgraphs that a higher-order operator (``cond``, ``scan``, ``while_loop``) reads; empty for other operators."""
    owner = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    values = [attrgetter(name)(owner) for name in names]
    return [value for value in values if isinstance(value, fx.GraphModule)]


_TALKS = ("c10d", "dtensor", "symm_mem", "fsdp", "distributed", "rpc")
"""Parts of the namespaces whose operators wait for other processes."""


def can_run_alone(target: object) -> bool:
    """Returns whether a node's target is an operator that mutates no argument and waits for no other process."""
    return waits_for_nobody(target) and not is_mutable(target)


def waits_for_nobody(target: Any) -> bool:
    """Returns whether a node's target is an operator that runs in this process alone."""
    return isinstance(target, OpOverload) and not waits_for_others(target)


def waits_for_others(target: Any) -> bool:
    """Returns whether a node's target is an operator that waits for other processes."""
    return isinstance(target, OpOverload) and any(part in target.namespace for part in _TALKS)


# -- calls without contents -------------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Like:
    """A tensor without its contents.

    Attributes:
        lazily: Lazy operations on the elements: a subset of `CONJUGATED`, `NEGATED` and `ZERO`.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    lazily: tuple[str, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> Like:
        """Returns a (fake) tensor without its contents, in its own or in other strides."""
        strides = sizes.hint_strides(tensor) if strides is None else strides
        return cls(sizes.hint_shape(tensor), strides, tensor.dtype, tensor.device.type, lazily(tensor))

    @property
    def elements(self) -> int:
        """Elements of the memory behind the tensor: repeated elements count once, gaps between elements count too."""
        if 0 in self.shape or ZERO in self.lazily:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the memory behind the tensor."""
        return self.elements * self.dtype.itemsize

    @property
    def is_of_places(self) -> bool:
        """True if the elements are integers, which are mostly indices into another tensor and have to be valid."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex or self.dtype is torch.bool)

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of this shape and these strides over the first `elements` of `memory`."""
        if ZERO in self.lazily:
            return torch._efficientzerotensor(self.shape, dtype=self.dtype, device=memory.device)
        return _lazily(memory.as_strided(self.shape, self.strides), self.lazily)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)}{self.strides}{self.device_type}{''.join(self.lazily)}"


CONJUGATED, NEGATED, ZERO = "conj", "neg", "zero"
"""Kinds of lazy tensors: with a conjugate or negative bit, or without memory (``_efficientzerotensor``).

The dispatcher hands most operators a copy of a lazy tensor.  Some, such as matrix products, copy it themselves or read it lazily.
"""


def lazily(tensor: torch.Tensor) -> tuple[str, ...]:
    """Returns the kinds of lazy tensor that a (fake) tensor is."""
    found = (CONJUGATED, tensor.is_conj()), (NEGATED, tensor.is_neg()), (ZERO, tensor._is_zerotensor())
    return tuple(name for name, is_so in found if is_so)


def _lazily(tensor: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Returns a view of `tensor` with the conjugate or negative bit that `names` has."""
    if CONJUGATED in names:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if NEGATED in names else tensor


class NotPlain(Exception):
    """Raised for an argument of which no copy can be made."""


Strides = Callable[[torch.Tensor], tuple[int, ...]]


def plain(value: Any, strides: Strides = sizes.hint_strides) -> Any:
    """Returns an argument of an operator with a `Like` for each tensor or node, and tuples for lists.

    Args:
        strides: Returns the strides in which the operator gets a tensor.

    Raises:
        NotPlain: The argument holds a value that is no strided tensor, no number and no other literal of an operator's schema.
    """
    if isinstance(value, fx.Node):
        if "val" not in value.meta:
            raise NotPlain
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise NotPlain
        return Like.of(value, strides(value))
    if isinstance(value, torch.SymInt):
        return sizes.hint_int(value)
    if isinstance(value, list | tuple):
        return tuple(plain(v, strides) for v in value)
    if value is None or isinstance(value, _PLAIN):
        return value
    raise NotPlain


def likes(value: Any) -> Iterator[Like]:
    """Yields all tensors in nested plain arguments."""
    if isinstance(value, Like):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from likes(part)


def text(value: Any) -> str:
    """Returns nested plain arguments in one line of text, equal for equal arguments."""
    return f"({', '.join(map(text, value))})" if isinstance(value, tuple) else str(value)


def filled(value: Any, make: Callable[[Like], torch.Tensor]) -> Any:
    """Returns nested plain arguments with ``make(like)`` for each `Like`, and lists for tuples, as operators on lists need."""
    if isinstance(value, Like):
        return make(value)
    return [filled(v, make) for v in value] if isinstance(value, tuple) else value
