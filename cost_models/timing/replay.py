"""Run the operator of one node alone, on random numbers of its sizes, and time it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from compile_remat._torch import conv_layout, sizes
from compile_remat._torch.ambient import plainly
from compile_remat._torch.operators import Like, NotPlain, can_run_alone, filled, likes, plain, text
from compile_remat.cost_models.operators.kinds import HEAVY_KINDS, OpKind
from compile_remat.cost_models.operators.ops import Op, describe
from compile_remat.cost_models.timing.clock import FLUSH_BYTES, Clock, median_ns

TIMED_KINDS = HEAVY_KINDS | {OpKind.OTHER}
"""Kinds that are kernels of their own. Other kinds fuse, reductions too: timed alone, they do not show their share of a kernel."""

_SEED_ELEMENTS = 2
"""Most elements of an integer tensor that counts as the generator state of an attention operator."""

FREE_SHARE = 0.8
"""An operator is timed if its tensors take at most this part of the free memory."""


@dataclass(frozen=True)
class Recipe:
    """One operator on tensors of given sizes.

    Attributes:
        signature: Operator, shapes, strides, dtypes and other arguments, in one line: equal for equal work.
        target: The operator.
        args: Arguments of the operator, with a `Like` in place of each tensor.
        kwargs: Keyword arguments in the same form, sorted by name.
        nbytes: Bytes of inputs and outputs.
    """

    signature: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    nbytes: int


def recipe_of(node: fx.Node) -> Recipe | None:
    """The recipe to run the node again; None if the node is no kernel of its own or cannot be run alone.

    None also for random operators, which would advance a generator; operators that write into an input or communicate with
    other processes; higher-order operators and kernels that are no operators of torch; and operators that read integers,
    which are mostly indices into another tensor and have to be valid.
    """
    if node.op != "call_function" or not can_run_alone(node.target):
        return None
    op = describe(node)
    if op.kind not in TIMED_KINDS or op.is_random:
        return None
    try:
        strides = conv_layout.convolution_strides if op.kind is OpKind.CONV else sizes.hint_strides
        args = plain(node.args, strides)
        kwargs = plain(sorted(node.kwargs.items()), strides)
    except NotPlain:
        return None
    if any(_are_places(like, op) for like in likes((args, kwargs))):
        return None
    signature = f"{op.target}({text(args)}{text(kwargs)})"
    nbytes = sum(like.nbytes for like in likes((args, kwargs))) + op.write_bytes
    return Recipe(signature, node.target, args, kwargs, nbytes)


def _are_places(like: Like, op: Op) -> bool:
    if not like.is_of_places:
        return False
    is_seed = op.kind is OpKind.ATTENTION and prod(like.shape) <= _SEED_ELEMENTS
    return not is_seed and op.kind not in (OpKind.MATMUL, OpKind.CONV)


# -- running it -----------------------------------------------------------------------------------------------------------


class CannotTime(Exception):
    """An operator cannot be timed on this device; the text says why."""


def time_ns(recipe: Recipe, device: torch.device, free_bytes: int | None, clock: Clock | None = None) -> int:
    """Median time of the operator in nanoseconds, its launch included.

    Args:
        device: The device of the operator's tensors.
        free_bytes: Bytes that are free on the device; None if not known.
        clock: Measures one call; by default `median_ns`.

    Raises:
        CannotTime: The tensors do not fit, or the operator fails on them.
    """
    needed = recipe.nbytes + (FLUSH_BYTES if device.type == "cuda" else 0)
    if free_bytes is not None and needed > FREE_SHARE * free_bytes:
        raise CannotTime(f"it takes {needed:,} bytes, and {free_bytes:,} are free")
    try:
        with plainly(device):
            generator = torch.Generator(device)
            args, kwargs = filled((recipe.args, recipe.kwargs), functools.partial(_tensor, device, generator))
            return max(1, (clock or median_ns)(lambda: recipe.target(*args, **dict(kwargs)), device))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # out of memory is a RuntimeError
        raise CannotTime(f"{type(error).__name__}: {error}") from None


def _tensor(device: torch.device, generator: torch.Generator, like: Like) -> torch.Tensor:
    """A tensor of True for bool, of normal numbers for floats, and of zeros for integers, which are seeds or factors.

    Floats of one byte, and floats on another device than `generator`, are zeros, too.
    """
    device = torch.device("cpu") if like.device_type == "cpu" else device
    memory = torch.zeros(like.elements, dtype=like.dtype, device=device)
    if like.dtype is torch.bool:
        memory.fill_(True)
    elif like.dtype.is_floating_point and like.dtype.itemsize > 1 and generator.device.type == device.type:
        memory.normal_(generator=generator)
    return like.over(memory)
