"""Measured peaks and measured time ratios, the same two functions on CPU and CUDA.

    peak = peak_bytes(step, "cuda")                       # most bytes live at once that step() allocated
    ratio = interleaved_ratio(plain, ours, pairs=30, device="cpu", seed=0)

What the peak counts. Bytes that `fn` allocates, above the level at its start. A tensor allocated before `fn` and freed
inside lowers the level on CUDA (the allocator only reports levels there) and is ignored on CPU (its free is seen, and
belongs to nothing that `fn` allocated): set gradients to None *before* the call, and both read the same. Not seen on
CPU: scratch inside oneDNN and MKL, numpy, Python objects. On CUDA the allocator rounds each block up to 512 bytes;
`requested_bytes` is the peak of what was asked for.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from compile_remat._torch.allocator_events import AllocationEvent, cpu_allocation_events

_RESAMPLES = 2000


@dataclass(frozen=True)
class Peak:
    """Memory of one call, in bytes above the level at its start."""

    peak_bytes: int
    end_bytes: int
    allocations: int
    requested_bytes: int


@dataclass(frozen=True)
class RatioInterval:
    """Median of the ratios b/a over `pairs` interleaved pairs, with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    pairs: int
    median_a_ns: int
    median_b_ns: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def peak_bytes(fn: Callable[[], object], device: torch.device | str) -> Peak:
    """Run `fn` once and return the most bytes live at once that it allocated on `device`."""
    with recorded(device) as peaks:
        result = fn()
    del result  # it was live at the end
    return peaks[0]


@contextmanager
def recorded(device: torch.device | str) -> Iterator[list[Peak]]:
    """What the body allocates on `device`: a list that holds one `Peak` when the body has ended.

    On CUDA this resets the allocator's peak statistics; on CPU a profiler runs, which must not begin within a compiled call.
    """
    kind = torch.device(device).type
    gc.collect()
    if kind == "cpu":
        return (yield from _recorded_on_cpu())
    if kind == "cuda":
        return (yield from _recorded_on_cuda(torch.device(device)))
    raise ValueError(f"peaks are measured on cpu and cuda devices, not on {device!r}")


def synchronize(device: torch.device | str) -> None:
    """Wait for the device; nothing to wait for on CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def step_times_ns(
    fn: Callable[[], object],
    repeats: int,
    device: torch.device | str,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[int]:
    """Wall-clock nanoseconds of `repeats` calls, the device waited for at both ends of each."""
    return [_timed(fn, device, clock) for _ in range(repeats)]


def device_times_ns(
    fn: Callable[[], object],
    repeats: int,
    device: torch.device | str,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[int]:
    """Nanoseconds of `repeats` calls by the device's own clock: CUDA events, between calls that follow each other unawaited.

    Elsewhere it is `step_times_ns`: there is no other clock.
    """
    if torch.device(device).type != "cuda":
        return step_times_ns(fn, repeats, device, clock)
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda.synchronize(device)
        marks[0].record()
        for mark in marks[1:]:
            fn()
            mark.record()
        torch.cuda.synchronize(device)
    return [int(start.elapsed_time(end) * 1e6) for start, end in pairwise(marks)]  # milliseconds


def interleaved_ratio(
    fn_a: Callable[[], object],
    fn_b: Callable[[], object],
    pairs: int,
    device: torch.device | str,
    seed: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> RatioInterval:
    """Time `fn_a` and `fn_b` in pairs, the order inside each pair drawn by `seed`; ratios are b/a.

    Both run close together in time, so that drift of the machine (clock rates, other load) cancels in each ratio.
    Call both once before, so that no compilation is timed.
    """
    if pairs < 1:
        raise ValueError(f"pairs must be at least 1, got {pairs}")
    draw = np.random.default_rng(seed)
    times_a, times_b = [], []
    for a_first in draw.random(pairs) < 0.5:
        if a_first:
            times_a.append(_timed(fn_a, device, clock))
            times_b.append(_timed(fn_b, device, clock))
        else:
            times_b.append(_timed(fn_b, device, clock))
            times_a.append(_timed(fn_a, device, clock))
    return _bootstrap(times_a, times_b, draw)


def _bootstrap(times_a: Sequence[int], times_b: Sequence[int], draw: np.random.Generator) -> RatioInterval:
    """Percentile bootstrap over pairs: resample the ratios, take the median of each resample."""
    ratios = np.asarray(times_b, dtype=np.float64) / np.maximum(np.asarray(times_a, dtype=np.float64), 1.0)
    picks = draw.integers(0, len(ratios), size=(_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975])
    return RatioInterval(
        median=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        pairs=len(ratios),
        median_a_ns=int(np.median(times_a)),
        median_b_ns=int(np.median(times_b)),
    )


def _timed(fn: Callable[[], object], device: torch.device | str, clock: Callable[[], int]) -> int:
    synchronize(device)
    start_ns = clock()
    fn()
    synchronize(device)
    return clock() - start_ns


def _recorded_on_cpu() -> Iterator[list[Peak]]:
    peaks: list[Peak] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peaks
    peaks.append(replay(cpu_allocation_events(profiler)))


def replay(events: Sequence[AllocationEvent]) -> Peak:
    """The peak of a run of allocator events; a free of an address that was not allocated among them is ignored."""
    live: dict[int, int] = {}
    level = peak = allocations = 0
    for event in events:
        if event.nbytes > 0:
            live[event.address] = event.nbytes
            level += event.nbytes
            allocations += 1
        else:
            level -= live.pop(event.address, 0)
        peak = max(peak, level)
    return Peak(peak_bytes=peak, end_bytes=level, allocations=allocations, requested_bytes=peak)


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
            allocations=above("allocation.all.allocated", "allocation.all.allocated"),
            requested_bytes=above("requested_bytes.all.peak", "requested_bytes.all.current"),
        )
    )
