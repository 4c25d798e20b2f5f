"""The clock of all timings: CUDA events on a GPU; on a CPU processor time if torch has one thread, else wall time.

`torch.utils.benchmark.Timer` is not used: it reads the host's clock, which includes the launches of short GPU kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Clock = Callable[[Callable[[], object], torch.device], int]
"""Returns the nanoseconds that a call takes on a device."""

WARM_CALLS, MIN_CALLS, MAX_CALLS = 2, 5, 100
MAX_TOTAL_NS = 100_000_000
"""`median_ns` stops after this much time, once it has timed `MIN_CALLS` calls."""

FLUSH_BYTES = 256 << 20
"""Bytes that `median_ns` writes before each timed call on a GPU: this flushes the cache and hides the call's launch."""


def elapsed_ns(
    run: Callable[[], Any], device: torch.device, *, calls: int = 1, before: Callable[[], Any] | None = None
) -> int:
    """Nanoseconds that `calls` calls of `run` take on `device`, at least 1.

    Args:
        before: On CUDA, longer work that is launched first: the launches of `run` queue up behind it and are not measured.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            if before is not None:
                before()
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
        return max(1, int(start.elapsed_time(end) * 1e6))  # from milliseconds
    clock = cpu_clock()
    start_ns = clock()
    for _ in range(calls):
        run()
    return max(1, clock() - start_ns)


def median_ns(run: Callable[[], Any], device: torch.device) -> int:
    """Median time in ns of repeated calls of `run`, on a GPU each with a cold cache."""
    is_cuda = device.type == "cuda"
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device).zero_ if is_cuda else None
    for _ in range(WARM_CALLS):
        run()
    times_ns: list[int] = []
    start_ns = time.perf_counter_ns()
    while len(times_ns) < MIN_CALLS or (len(times_ns) < MAX_CALLS and time.perf_counter_ns() - start_ns < MAX_TOTAL_NS):
        times_ns.append(elapsed_ns(run, device, before=flush))
    return int(statistics.median(times_ns))


def cpu_clock() -> Callable[[], int]:
    """The CPU clock in ns: with one thread the process's processor time, which other load does not lengthen, else wall time."""
    return time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns


def clock_name(device: torch.device) -> str:
    """The clock that `elapsed_ns` reads on this device, in words."""
    if device.type == "cuda":
        return "CUDA events"
    return "processor time of the process, one thread" if torch.get_num_threads() == 1 else "wall clock"
