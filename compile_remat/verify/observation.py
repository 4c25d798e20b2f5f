"""Observes one step: runs a compiled graph forward and backward on copies of its arguments and returns all its results.

The caller's tensors do not change: arguments that the graph may write into are copied first, and gradients are returned, not
accumulated.  `side_runs` restores the random state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_remat._torch import sizes, tensor_arguments
from compile_remat._torch.ambient import read_random_state

Key = tuple[str, int | str]
Observed = dict[Key, Any]

OUTPUT, INPUT, RANDOM, GRADIENT = "output", "input", "random", "gradient"


class NotComparable(Exception):
    """A step cannot be run twice; the text gives the reason."""


@dataclass(frozen=True)
class Nudge:
    """Scales every element of the parameters by 1 + `epsilon` or 1 - `epsilon`, at random by `seed`."""

    epsilon: float
    seed: int


@dataclass(frozen=True)
class Copies:
    """Arguments for one side run.

    Attributes:
        arguments: The arguments of the graph.
        leaves: Leaves of the arguments that require a gradient, by position; the argument itself, or the tensor that it is a
            clone of, if the graph may write into it.
        copied: Positions of tensors that share no memory with the caller's.
    """

    arguments: list[Any]
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    copied: tuple[int, ...] = ()


def refuse_uncopyable(arguments: Iterable[Any]) -> None:
    """Raise `NotComparable` if an argument cannot be copied element by element, or holds hidden state."""
    for value in arguments:
        if value is None or isinstance(value, bool | int | float | complex | str | torch.SymInt):
            continue
        if not isinstance(value, torch.Tensor):
            raise NotComparable(f"the graph takes a {type(value).__name__}, whose state cannot be saved")
        if not tensor_arguments.is_plain_tensor(value):
            raise NotComparable(f"the graph takes a {type(value).__name__}, which is no plain tensor")


def copy_arguments(
    arguments: Sequence[Any],
    mutated: Collection[int] | None,
    nudge: Nudge | None = None,
) -> Copies:
    """Copy all tensors but parameters that the graph does not write into; copies overlap in memory exactly as their originals do.

    Args:
        mutated: Positions of the arguments that the graph writes into; None if any may be written.
        nudge: Scales the parameters, which are then copied too; None to leave them unchanged.
    """
    shares_parameters = mutated is not None and nudge is None
    copied = tuple(
        k
        for k, value in enumerate(arguments)
        if isinstance(value, torch.Tensor)
        and not (shares_parameters and isinstance(value, torch.nn.Parameter) and k not in (mutated or ()))
    )
    made = list(arguments)
    with torch.no_grad(), tensor_arguments.no_torch_function():
        for group in _overlapping({k: arguments[k] for k in copied}):
            made = _copy_group(made, group, nudge)
        made = [v.detach() if isinstance(v, torch.Tensor) and k not in copied else v for k, v in enumerate(made)]
    leaves = {
        k: made[k].requires_grad_()
        for k, value in enumerate(arguments)
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    for k, leaf in leaves.items():
        if not arguments[k].is_leaf and (mutated is None or k in mutated):
            made[k] = leaf.clone()  # may be written in place, so it must not be a leaf; its gradient is the leaf's
    return Copies(made, leaves, copied)


def _overlapping(tensors: dict[int, torch.Tensor]) -> list[list[int]]:
    """Returns the positions in groups of tensors that overlap in memory."""
    placed: list[tuple[tuple[str, int], int, int, int]] = []
    for k, tensor in tensors.items():
        start = tensor.data_ptr()
        key = (str(tensor.device), tensor.untyped_storage().data_ptr())
        placed.append((key, start, start + sizes.storage_nbytes(tensor), k))
    groups: list[list[int]] = []
    last: tuple[tuple[str, int], int] | None = None
    for key, start, end, k in sorted(placed):
        if last is not None and last[0] == key and start < last[1]:
            groups[-1].append(k)
            last = (key, max(end, last[1]))
        else:
            groups.append([k])
            last = (key, end)
    return groups


ALIGNMENT = 64
"""Copies keep their address offset modulo this number of bytes, because kernels may be compiled for an alignment."""


def _copy_group(made: list[Any], group: list[int], nudge: Nudge | None) -> list[Any]:
    tensors = [made[k] for k in group]
    storage = tensors[0].untyped_storage()
    starts = [t.storage_offset() * t.dtype.itemsize for t in tensors]
    low = min(starts) // ALIGNMENT * ALIGNMENT
    high = max(start + sizes.storage_nbytes(t) for start, t in zip(starts, tensors, strict=True))
    raw = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage, low, (high - low,), (1,))
    raw = raw.clone()
    if nudge is not None:
        _move(raw, tensors, nudge)
    made = list(made)
    first = tensors[0].dtype
    base = torch.empty(0, dtype=first, device=raw.device)
    base.set_(raw.untyped_storage(), 0, ((high - low) // first.itemsize,), (1,))
    # Torch 2.11 accepts inputs that share memory, one of them mutated, only as views of one base.
    are_views = len(group) > 1 and all(t.dtype == first and not t.requires_grad for t in tensors)
    for k, start, tensor in zip(group, starts, tensors, strict=True):
        layout = tensor.shape, tensor.stride(), (start - low) // tensor.dtype.itemsize
        made[k] = base.as_strided(*layout) if are_views else _placed(raw, tensor.dtype, *layout)
    return made


def _placed(
    raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Returns a new tensor, no view, on the memory of `raw`."""
    tensor = torch.empty(0, dtype=dtype, device=raw.device)
    return tensor.set_(raw.untyped_storage(), offset, shape, stride)


def _move(raw: torch.Tensor, tensors: Sequence[torch.Tensor], nudge: Nudge) -> None:
    """Nudge parameters and tensors that require a gradient, in place; other tensors may be labels and masks and stay exact."""
    dtypes = {t.dtype for t in tensors}
    is_number = tensors[0].is_floating_point() or tensors[0].is_complex()
    is_free = any(t.requires_grad or isinstance(t, torch.nn.Parameter) for t in tensors)
    if len(dtypes) > 1 or not is_number or not is_free or tensors[0].dtype.itemsize == 1:
        return
    usable = len(raw) // tensors[0].dtype.itemsize * tensors[0].dtype.itemsize
    flat = raw[:usable].view(tensors[0].dtype)
    draw = torch.Generator(flat.device).manual_seed(nudge.seed + flat.numel())
    up = torch.randint(0, 2, flat.shape, generator=draw, device=flat.device, dtype=torch.bool)
    flat.mul_(torch.where(up, 1 + nudge.epsilon, 1 - nudge.epsilon).to(flat.dtype))


# -- the step -----------------------------------------------------------------------------------------------------------


def observe(function: Callable[..., Any], copies: Copies, devices: Sequence[torch.device]) -> Observed:
    """Run the forward and, if a result requires a gradient, the backward; returns all results, copied to the CPU."""
    with tensor_arguments.detached_from_callers_autograd(), torch.enable_grad():
        outputs = function(*copies.arguments)
        seen: Observed = {(OUTPUT, k): _keep(value) for k, value in enumerate(outputs)}
        seen |= {(INPUT, k): _keep(copies.arguments[k]) for k in copies.copied}
        written = (copies.arguments[k] for k in copies.copied)
        ends = [t for t in (*outputs, *written) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        del outputs
        gradients: Sequence[torch.Tensor | None] = [None] * len(copies.leaves)
        if ends and copies.leaves:
            tangents = [_tangent(t, k) for k, t in enumerate(ends)]
            gradients = torch.autograd.grad(ends, list(copies.leaves.values()), tangents, allow_unused=True)
    seen |= {(GRADIENT, k): _keep(g) for k, g in zip(copies.leaves, gradients, strict=True)}
    return seen | {(RANDOM, place): state for place, state in read_random_state(devices).items()}


def _tangent(output: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns random numbers of magnitude 0.5 to 1.5 and of either sign, from a separate generator, equal in every side run."""
    if not tensor_arguments.is_plain_tensor(output):
        raise NotComparable(f"the graph returns a {type(output).__name__}, which is no plain tensor")
    draw = torch.Generator(output.device).manual_seed(seed)
    kind = torch.complex64 if output.is_complex() else torch.float32
    numbers = torch.rand(output.shape, generator=draw, device=output.device, dtype=kind)
    numbers = numbers + torch.where(numbers.real < 0.5, -1.5, 0.5) if output.numel() else numbers
    return torch.empty_like(output, requires_grad=False).copy_(numbers)


def _keep(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not tensor_arguments.is_plain_tensor(value) and value.layout is torch.strided:
        raise NotComparable(f"the graph returns a {type(value).__name__}, which is no plain tensor")
    return value.detach().to("cpu", copy=True)
