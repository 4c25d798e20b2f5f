"""Sizes, strides and bytes of (fake) tensors as plain ints; symbolic sizes are taken at their hints and no guard is added.

Private names of torch: ``symbolic_shapes.optimization_hint`` from 2.12, ``size_hint`` in 2.11.
"""

from __future__ import annotations

import torch

from compile_remat._torch.version import private_name

_optimization_hint = private_name("torch.fx.experimental.symbolic_shapes", "optimization_hint", "size_hint")


def hint_int(size: int | torch.SymInt, fallback: int = 4096) -> int:
    """The size, or for a symbolic one the value seen first; adds no guard.  Unbacked and jagged sizes give `fallback`."""
    if type(size) is int:
        return size
    if is_jagged(size):
        return fallback
    return int(_optimization_hint(size, fallback=fallback))


def is_jagged(size: int | torch.SymInt) -> bool:
    """Whether a size is that of a jagged dimension of a nested tensor: it stands for one length a row, and is no number."""
    return isinstance(size, torch.SymInt) and bool(size.node.is_nested_int())


def hint_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of a (fake) tensor as plain ints; adds no guard."""
    return tuple(hint_int(s) for s in tensor.shape)


def hint_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a (fake) tensor, in elements, as plain ints; adds no guard."""
    return tuple(hint_int(s) for s in tensor.stride())


def storage_nbytes(value: object) -> int:
    """Bytes of the storage that a dense (fake) tensor of this shape and stride occupies; 0 for anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    if value.layout is not torch.strided or hasattr(value, "__tensor_flatten__"):
        return hint_int(value.numel()) * value.dtype.itemsize
    extent = 1
    for size, stride in zip(hint_shape(value), hint_strides(value), strict=True):
        if size == 0:
            return 0
        extent += (size - 1) * stride
    return extent * value.dtype.itemsize


def padded_nbytes(value: object, above: int, alignment_bytes: int) -> int:
    """`storage_nbytes` of a tensor without gaps, once its strides of more than `above` elements are rounded up.

    Args:
        above: Strides up to this number of elements stay.
        alignment_bytes: What the others are made multiples of.
    """
    if not isinstance(value, torch.Tensor) or any(type(s) is not int for s in (*value.shape, *value.stride())):
        return storage_nbytes(value)
    align, stride, extent = max(1, alignment_bytes // value.dtype.itemsize), 1, 1
    for _, size in sorted(zip(value.stride(), value.shape, strict=True), key=lambda dim: dim[0]):
        stride = -(-stride // align) * align if stride > above else stride
        extent += (size - 1) * stride
        stride *= size
    return extent * value.dtype.itemsize if value.numel() else 0
