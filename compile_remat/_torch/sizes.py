"""Sizes, strides and bytes of (fake) tensors as plain ints; no guard is added.

A symbolic size is replaced by its hint, the size seen first, or inside of `sizes_at` by the size given there.

Private names of torch: ``symbolic_shapes.optimization_hint`` from 2.12, ``size_hint`` in 2.11; of a shape environment,
``bound_sympy`` and ``var_to_sources``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from compile_remat._torch.version import private_name

_optimization_hint = private_name("torch.fx.experimental.symbolic_shapes", "optimization_hint", "size_hint")


@dataclass(frozen=True)
class _Bound:
    """Sizes of symbols by name, and a cache of the values of expressions at these sizes."""

    sizes: dict[str, int] = field(default_factory=dict)
    known: dict[Any, int | None] = field(default_factory=dict)


_BOUND: ContextVar[_Bound | None] = ContextVar("compile_remat sizes", default=None)


@contextmanager
def sizes_at(sizes: Iterable[tuple[str, int]]) -> Iterator[None]:
    """Replace the hints of symbols by these sizes, for all functions of this module, in this thread, inside this context."""
    token = _BOUND.set(_Bound(dict(sizes)))
    try:
        yield
    finally:
        _BOUND.reset(token)


FALLBACK = 4096
"""Replaces a size that depends on data and has no upper bound, as in torch's partitioner."""


def hint_int(size: int | torch.SymInt, fallback: int = FALLBACK) -> int:
    """Returns the size as an int: a symbolic size at `sizes_at`, else at its hint, the value seen first.  Adds no guard.

    A size that depends on data becomes its upper bound (`torch._check`), or `fallback` if it has none; a jagged size, `fallback`.
    """
    if type(size) is int:
        return size
    if is_jagged(size):
        return fallback
    expression = _expression(size)
    if expression is None:  # a number that is no SymInt with an expression
        return int(_optimization_hint(size, fallback=fallback))
    bound = _BOUND.get() or _Bound()
    if expression not in bound.known:
        bound.known[expression] = _at(size, expression, bound.sizes)
    found = bound.known[expression]
    return int(_optimization_hint(size, fallback=fallback)) if found is None else found


def _at(size: Any, expression: Any, sizes: dict[str, int]) -> int | None:
    """Returns the value of an expression at these sizes and upper bounds; None if these do not determine it."""
    values: dict[Any, int] = {}
    for symbol in expression.free_symbols:
        if symbol.name in sizes:
            values[symbol] = sizes[symbol.name]
        elif is_unbacked(symbol):
            upper = _upper(size.node.shape_env, symbol)
            if upper is not None:
                values[symbol] = upper
    if not values:
        return None
    found = expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    return int(found) if found.is_number else None


def is_unbacked(symbol: Any) -> bool:
    """Returns whether a symbol is unbacked: its value depends on data."""
    return str(symbol.name).startswith("u")


def _upper(environment: Any, symbol: Any) -> int | None:
    """Returns the largest value that a symbol may have; None without a bound below `MOST`."""
    upper = environment.bound_sympy(symbol).upper
    return int(upper) if upper.is_number and upper.is_finite and upper < MOST else None


MOST = 1 << 40
"""An upper bound of at least this counts as none."""


@dataclass(frozen=True)
class Symbol:
    """A size among the inputs of a graph.

    Attributes:
        size: Its size now, as `hint_int` returns it.
        upper: The largest size that Dynamo's guards admit; None if there is no limit.
        source: The expression by which the user's code reaches the size; empty if torch has none.
    """

    name: str
    size: int
    upper: int | None
    source: str


def symbols_of(graph: fx.Graph) -> tuple[Symbol, ...]:
    """Returns the inputs of a graph that are sizes of its tensors: Dynamo adds an input for each dynamic size."""
    used = {symbol for size in _sizes_in(graph) for symbol in getattr(_expression(size), "free_symbols", ())}
    found: dict[str, Symbol] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        symbol = _expression(value)
        if symbol in used and not is_unbacked(symbol):
            environment = value.node.shape_env
            source = next(iter(environment.var_to_sources.get(symbol, ())), None)
            name = getattr(source, "name", "")
            text = str(name() if callable(name) else name)
            found[symbol.name] = Symbol(symbol.name, hint_int(value), _upper(environment, symbol), text)
    return tuple(found.values())


def unbounded_of(graph: fx.Graph) -> tuple[str, ...]:
    """Returns the unbacked symbols in a graph's sizes without an upper bound, sorted: `hint_int` replaces them by a fallback."""
    found: dict[str, None] = {}
    for size in _sizes_in(graph):
        for symbol in getattr(_expression(size), "free_symbols", ()):
            if is_unbacked(symbol) and _upper(size.node.shape_env, symbol) is None:
                found[symbol.name] = None
    return tuple(sorted(found))


def _sizes_in(graph: fx.Graph) -> Iterator[Any]:
    values = [node.meta.get("val") for node in graph.nodes]
    return (size for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) for size in leaf.shape)


def _expression(size: object) -> Any:
    """Returns the sympy expression of a SymInt; None for a jagged size and any other value."""
    return getattr(size.node, "expr", None) if isinstance(size, torch.SymInt) and not is_jagged(size) else None


def is_jagged(size: int | torch.SymInt) -> bool:
    """Returns whether a size belongs to a nested tensor's jagged dimension: it stands for one length per row, and is no number."""
    return isinstance(size, torch.SymInt) and bool(size.node.is_nested_int())


def hint_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of a (fake) tensor as plain ints; adds no guard."""
    return tuple(hint_int(s) for s in tensor.shape)


def hint_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a (fake) tensor, in elements, as plain ints; adds no guard."""
    return tuple(hint_int(s) for s in tensor.stride())


def storage_nbytes(value: object) -> int:
    """Bytes of the storage that a (fake) tensor of this shape and these strides occupies; 0 for a value that is no tensor.

    For sparse tensors and wrapper subclasses: the bytes of all elements.  ``torch._efficientzerotensor`` has no memory.
    """
    if not isinstance(value, torch.Tensor) or value._is_zerotensor():
        return 0
    if value.layout is not torch.strided or hasattr(value, "__tensor_flatten__"):
        return hint_int(value.numel()) * value.dtype.itemsize
    extent = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if type(size) is not int or type(stride) is not int:  # asked of every node: plain numbers need no call
            size, stride = hint_int(size), hint_int(stride)
        if size == 0:
            return 0
        extent += (size - 1) * stride
    return extent * value.dtype.itemsize


CUDA_BLOCK_BYTES = 512
"""Torch's CUDA allocator rounds sizes up to multiples of this (``kMinBlockSize``; "Memory management" in notes/cuda.html)."""


def in_blocks(nbytes: int, device_type: str) -> int:
    """Bytes that a device's allocator takes for a buffer: rounded up to whole blocks on CUDA."""
    return -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES if device_type == "cuda" else nbytes


def padded_nbytes(value: object, above: int, alignment_bytes: int) -> int:
    """`storage_nbytes` of a tensor without gaps after its strides of more than `above` elements are rounded up.

    Args:
        above: Strides up to this number of elements are not rounded.
        alignment_bytes: The multiple, in bytes, to which larger strides are rounded up.
    """
    if not isinstance(value, torch.Tensor) or any(type(s) is not int for s in (*value.shape, *value.stride())):
        return storage_nbytes(value)
    align, stride, extent = max(1, alignment_bytes // value.dtype.itemsize), 1, 1
    for _, size in sorted(zip(value.stride(), value.shape, strict=True), key=lambda dim: dim[0]):
        stride = -(-stride // align) * align if stride > above else stride
        extent += (size - 1) * stride
        stride *= size
    return extent * value.dtype.itemsize if value.numel() else 0
