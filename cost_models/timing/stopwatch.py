"""How long one operator takes by itself, on random numbers of its sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from compile_remat._torch.isolated_op import plainly
from compile_remat.cost_models.timing.cuda_events import elapsed_ns
from compile_remat.cost_models.timing.replay import Like, Recipe

Clock = Callable[[Callable[[], object], torch.device], int]
"""Nanoseconds that a call takes on a device."""

WARM_CALLS, LEAST_CALLS, MOST_CALLS = 2, 5, 100
LIMIT_NS = 100_000_000
"""After so long no further call is timed, once `LEAST_CALLS` were."""

FLUSH_BYTES = 256 << 20
"""Written before each call on a GPU: it empties the cache, and takes long enough for the call to be queued behind it."""

FREE_SHARE = 0.8
"""An operator runs if its tensors take at most this part of the memory that is free."""


class CannotTime(Exception):
    """An operator cannot be run here; the text says why."""


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


def median_ns(run: Callable[[], object], device: torch.device) -> int:
    """Median of repeated calls: by CUDA events on a GPU, by the clock elsewhere."""
    timed = _by_events(device) if device.type == "cuda" else _by_clock
    for _ in range(WARM_CALLS):
        run()
    times: list[int] = []
    start = time.perf_counter_ns()
    while len(times) < LEAST_CALLS or (len(times) < MOST_CALLS and time.perf_counter_ns() - start < LIMIT_NS):
        times.append(timed(run))
    return int(statistics.median(times))


def _by_clock(run: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - start


def _by_events(device: torch.device) -> Callable[[Callable[[], object]], int]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    return lambda run: elapsed_ns(run, device, flush.zero_)


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
