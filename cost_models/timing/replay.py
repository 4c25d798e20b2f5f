"""Run the operator of one node alone, on random numbers of its sizes, and time it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from compile_remat._torch import conv_layout, sizes
from compile_remat._torch.ambient import plainly
from compile_remat._torch.operators import can_run_alone
from compile_remat.cost_models.operators.kinds import HEAVY_KINDS, OpKind
from compile_remat.cost_models.operators.ops import Op, describe
from compile_remat.cost_models.timing.clock import FLUSH_BYTES, Clock, median_ns

TIMED_KINDS = HEAVY_KINDS | {OpKind.OTHER}
"""Kinds that are kernels of their own. The others fuse, reductions too: such an operator run alone says nothing of its share."""

_SEED_ELEMENTS = 2
"""Attention gets the state of a generator: tensors of integers as small as this."""

FREE_SHARE = 0.8
"""An operator is timed if its tensors take at most this part of the free memory."""

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Like:
    """A tensor without its contents."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @property
    def elements(self) -> int:
        """Elements of the memory behind it: what is repeated counts once, what is skipped counts."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the memory behind it."""
        return self.elements * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)}{self.strides}{self.device_type}"


@dataclass(frozen=True)
class Recipe:
    """One operator on tensors of given sizes.

    Attributes:
        signature: Operator, shapes, strides, dtypes and other arguments, in one line: equal for equal work.
        args: The operator's, with a `Like` in place of each tensor.
        nbytes: Of inputs and outputs.
    """

    signature: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    nbytes: int


class _NotPlain(Exception):
    """An argument of which no copy can be made."""


def recipe_of(node: fx.Node) -> Recipe | None:
    """How to run the node again; None for what is not a kernel of its own, or cannot be run alone.

    Not run: random operators, since that would move a generator; those that write into an input or talk to other
    processes; higher-order operators and kernels that are no operators of torch; and those that read integers, which are
    mostly places in another tensor and have to be right.
    """
    if node.op != "call_function" or not can_run_alone(node.target):
        return None
    op = describe(node)
    if op.kind not in TIMED_KINDS or op.is_random:
        return None
    try:
        args = tuple(_plain(a, op.kind) for a in node.args)
        kwargs = tuple((name, _plain(value, op.kind)) for name, value in sorted(node.kwargs.items()))
    except _NotPlain:
        return None
    if any(_are_places(like, op) for like in _likes((args, kwargs))):
        return None
    signature = f"{op.target}({_text(args)}{_text(kwargs)})"
    nbytes = sum(like.nbytes for like in _likes((args, kwargs))) + op.write_bytes
    return Recipe(signature, node.target, args, kwargs, nbytes)


def _are_places(like: Like, op: Op) -> bool:
    if like.dtype.is_floating_point or like.dtype.is_complex or like.dtype is torch.bool:
        return False
    is_seed = op.kind is OpKind.ATTENTION and prod(like.shape) <= _SEED_ELEMENTS
    return not is_seed and op.kind not in (OpKind.MATMUL, OpKind.CONV)


def _plain(value: Any, kind: OpKind) -> Any:
    if isinstance(value, fx.Node):
        if "val" not in value.meta:
            raise _NotPlain
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise _NotPlain
        is_convolution = kind is OpKind.CONV
        strides = conv_layout.convolution_strides(value) if is_convolution else sizes.hint_strides(value)
        return Like(sizes.hint_shape(value), strides, value.dtype, value.device.type)
    if isinstance(value, torch.SymInt):
        return sizes.hint_int(value)
    if isinstance(value, list | tuple):
        return tuple(_plain(v, kind) for v in value)
    if value is None or isinstance(value, _PLAIN):
        return value
    raise _NotPlain


def _likes(value: Any) -> list[Like]:
    if isinstance(value, Like):
        return [value]
    return [like for v in value for like in _likes(v)] if isinstance(value, tuple) else []


def _text(value: Any) -> str:
    return f"({', '.join(map(_text, value))})" if isinstance(value, tuple) else str(value)


# -- running it -----------------------------------------------------------------------------------------------------------


class CannotTime(Exception):
    """An operator cannot be timed here; the text says why."""


def time_ns(recipe: Recipe, device: torch.device, free_bytes: int | None, clock: Clock | None = None) -> int:
    """Median time of the operator in nanoseconds, its launch included.

    Args:
        device: Where its tensors are made.
        free_bytes: What may be allocated there; None where that is not known.
        clock: Measures one call; by default `median_ns`.

    Raises:
        CannotTime: Its tensors do not fit, or it does not run on them.
    """
    needed = recipe.nbytes + (FLUSH_BYTES if device.type == "cuda" else 0)
    if free_bytes is not None and needed > FREE_SHARE * free_bytes:
        raise CannotTime(f"it takes {needed:,} bytes, and {free_bytes:,} are free")
    try:
        with plainly(device):
            generator = torch.Generator(device)
            args = [_filled(a, device, generator) for a in recipe.args]
            kwargs = {name: _filled(value, device, generator) for name, value in recipe.kwargs}
            return max(1, (clock or median_ns)(lambda: recipe.target(*args, **kwargs), device))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # out of memory is a RuntimeError
        raise CannotTime(f"{type(error).__name__}: {error}") from None


def _filled(value: Any, device: torch.device, generator: torch.Generator) -> Any:
    """Tensors in place of each `Like`; lists for tuples, which operators on lists of tensors want."""
    if isinstance(value, Like):
        return _tensor(value, torch.device("cpu") if value.device_type == "cpu" else device, generator)
    return [_filled(v, device, generator) for v in value] if isinstance(value, tuple) else value


def _tensor(like: Like, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers, True, or zeros: for integers, which are seeds or factors, and where the generator is of another device."""
    memory = torch.zeros(like.elements, dtype=like.dtype, device=device)
    if like.dtype is torch.bool:
        memory.fill_(True)
    elif like.dtype.is_floating_point and like.dtype.itemsize > 1 and generator.device.type == device.type:
        memory.normal_(generator=generator)
    return memory.as_strided(like.shape, like.strides)
