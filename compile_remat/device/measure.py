"""Measures peaks, with the same function on CPU and CUDA.

    peak = peak_bytes(step, "cuda")                       # most bytes live at once that step() allocated

The peak counts the bytes that `fn` allocates, above the level at its start. A tensor allocated before `fn` and freed inside
lowers the level on CUDA (the allocator only reports levels there) and is ignored on CPU (the free belongs to no allocation of
`fn`): set gradients to None *before* the call, and both devices give the same figure. On CPU the profiler does not see scratch
inside oneDNN and MKL, numpy, Python objects, and frees by threads that it does not watch, such as gloo's: a block freed there
counts until its address is allocated again. On CUDA the allocator rounds each block up to 512 bytes; `requested_bytes` is the
peak of the requested sizes.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from compile_remat._torch.allocator_events import AllocationEvent, cpu_allocation_events


@dataclass(frozen=True)
class Peak:
    """Memory of one call, in bytes above the level at its start."""

    peak_bytes: int
    end_bytes: int
    requested_bytes: int


def peak_bytes(fn: Callable[[], object], device: torch.device | str) -> Peak:
    """Run `fn` once and return the most bytes live at once that it allocated on `device`."""
    with recorded(device) as peaks:
        result = fn()
    del result  # kept until here, so that it counts as live at the end
    return peaks[0]


@contextmanager
def recorded(device: torch.device | str) -> Iterator[list[Peak]]:
    """Measure the body's allocations on `device`; yields a list that holds one `Peak` once the body has ended.

    On CUDA this resets the allocator's peak statistics; on CPU a profiler runs, which must not begin within a compiled call.

    Raises:
        ValueError: The device is neither CPU nor CUDA.
    """
    kind = torch.device(device).type
    gc.collect()
    if kind == "cpu":
        return (yield from _recorded_on_cpu())
    if kind == "cuda":
        return (yield from _recorded_on_cuda(torch.device(device)))
    raise ValueError(f"peaks are measured on cpu and cuda devices, not on {device!r}")


def synchronize(device: torch.device | str) -> None:
    """Wait for the device; does nothing unless it is a CUDA device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _recorded_on_cpu() -> Iterator[list[Peak]]:
    peaks: list[Peak] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peaks
    peaks.append(replay(cpu_allocation_events(profiler)))


def replay(events: Sequence[AllocationEvent]) -> Peak:
    """Returns the peak of a sequence of allocator events.

    A free of an address that no earlier event allocated is ignored.  An address that is allocated twice counts once: a thread that
    the profiler did not watch has freed it in between.
    """
    live: dict[int, int] = {}
    level = peak = 0
    for event in events:
        if event.nbytes > 0:
            level += event.nbytes - live.pop(event.address, 0)
            live[event.address] = event.nbytes
        else:
            level -= live.pop(event.address, 0)
        peak = max(peak, level)
    return Peak(peak_bytes=peak, end_bytes=level, requested_bytes=peak)


def _recorded_on_cuda(device: torch.device) -> Iterator[list[Peak]]:
    peaks: list[Peak] = []
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    yield peaks
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)

    def above(key_after: str, key_before: str) -> int:
        return int(after.get(key_after, 0)) - int(before.get(key_before, 0))

    peaks.append(
        Peak(
            peak_bytes=above("allocated_bytes.all.peak", "allocated_bytes.all.current"),
            end_bytes=above("allocated_bytes.all.current", "allocated_bytes.all.current"),
            requested_bytes=above("requested_bytes.all.peak", "requested_bytes.all.current"),
        )
    )
