"""What torch's operator overloads say of themselves, and calls of them without the contents of their tensors.

Private names, the same in 2.11 to 2.15: ``torch._ops.OpOverload`` with ``_schema``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """Whether the target is an operator that writes into one of its arguments."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


def namespace_of(node: fx.Node) -> str | None:
    """The library of the node's operator, such as ``aten``; None for a Python function."""
    target: Any = node.target
    return str(target.namespace) if isinstance(target, OpOverload) else None


def is_complex(node: fx.Node) -> bool:
    """Whether a node reads or writes complex numbers: then Inductor calls ATen (``fallback_node_due_to_unsupported_type``)."""
    if _holds_complex(node.meta.get("val")):
        return True
    for read in node.all_input_nodes:  # a loop: this is asked for every pointwise node, many times
        if _holds_complex(read.meta.get("val")):
            return True
    return False


def _holds_complex(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype.is_complex
    return isinstance(value, list | tuple) and any(map(_holds_complex, value))


def reduced_dims(node: fx.Node) -> frozenset[int]:
    """The dimensions of its first argument that a reduction names; none where it names none, and so goes over all."""
    if not isinstance(node.target, OpOverload):
        return frozenset()
    names = [argument.name for argument in node.target._schema.arguments]
    dims: Any = (dict(zip(names, node.args, strict=False)) | node.kwargs).get("dim")
    ndim = node.all_input_nodes[0].meta["val"].dim()
    return frozenset(d % ndim for d in (dims if isinstance(dims, list | tuple) else [] if dims is None else [dims]))


def inner_graphs(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator (``cond``, ``scan``, ``while_loop``) is called with; none for other operators."""
    owner = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    values = [attrgetter(name)(owner) for name in names]
    return [value for value in values if isinstance(value, fx.GraphModule)]


_TALKS = ("c10d", "dtensor", "symm_mem", "fsdp", "distributed", "rpc")
"""Parts of the names of libraries whose operators wait for other processes."""


def can_run_alone(target: object) -> bool:
    """Whether a node's target is an operator that writes into nothing and waits for no other process."""
    return waits_for_nobody(target) and not is_mutable(target)


def waits_for_nobody(target: Any) -> bool:
    """Whether a node's target is an operator that runs in this process alone."""
    return isinstance(target, OpOverload) and not waits_for_others(target)


def waits_for_others(target: Any) -> bool:
    """Whether a node's target is an operator that waits for other processes."""
    return isinstance(target, OpOverload) and any(part in target.namespace for part in _TALKS)


# -- calls without contents -------------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Like:
    """A tensor without its contents.

    Attributes:
        lazily: What an operator may still have to do to the elements before it reads them.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    lazily: tuple[str, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> Like:
        """A (fake) tensor without its contents, under its own or other strides."""
        strides = sizes.hint_strides(tensor) if strides is None else strides
        return cls(sizes.hint_shape(tensor), strides, tensor.dtype, tensor.device.type, lazily(tensor))

    @property
    def elements(self) -> int:
        """Elements of the memory behind it: what is repeated counts once, what is skipped counts."""
        if 0 in self.shape or ZERO in self.lazily:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the memory behind it."""
        return self.elements * self.dtype.itemsize

    @property
    def is_of_places(self) -> bool:
        """Whether its elements are integers, which are mostly places in another tensor and have to be right."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex or self.dtype is torch.bool)

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Such a tensor, of the `elements` in `memory`."""
        if ZERO in self.lazily:
            return torch._efficientzerotensor(self.shape, dtype=self.dtype, device=memory.device)
        return _lazily(memory.as_strided(self.shape, self.strides), self.lazily)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)}{self.strides}{self.device_type}{''.join(self.lazily)}"


CONJUGATED, NEGATED, ZERO = "conj", "neg", "zero"
"""Of a lazy tensor: its elements stand conjugated or negated in memory, or it has no memory (``_efficientzerotensor``).

Most operators that get one are handed a copy by the dispatcher; some, such as matrix products, make it themselves, or read on.
"""


def lazily(tensor: torch.Tensor) -> tuple[str, ...]:
    """Which of these a (fake) tensor is."""
    found = (CONJUGATED, tensor.is_conj()), (NEGATED, tensor.is_neg()), (ZERO, tensor._is_zerotensor())
    return tuple(name for name, is_so in found if is_so)


def _lazily(tensor: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """A view of `tensor` that is such a one."""
    if CONJUGATED in names:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if NEGATED in names else tensor


class NotPlain(Exception):
    """An argument of which no copy can be made."""


Strides = Callable[[torch.Tensor], tuple[int, ...]]


def plain(value: Any, strides: Strides = sizes.hint_strides) -> Any:
    """An argument of an operator with a `Like` for each tensor or node of one, and tuples for lists.

    Args:
        strides: Those under which the operator gets a tensor.

    Raises:
        NotPlain: It is no tensor of ordinary layout, no number, and no other value that can be written down.
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
    """All tensors in a nest of plain arguments."""
    if isinstance(value, Like):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from likes(part)


def text(value: Any) -> str:
    """A nest of plain arguments in one line: equal for equal arguments."""
    return f"({', '.join(map(text, value))})" if isinstance(value, tuple) else str(value)


def filled(value: Any, make: Callable[[Like], torch.Tensor]) -> Any:
    """What `make` gives in place of each `Like`; lists for tuples, which operators on lists of tensors want."""
    if isinstance(value, Like):
        return make(value)
    return [filled(v, make) for v in value] if isinstance(value, tuple) else value
