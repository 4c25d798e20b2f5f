"""Times of training steps: interleaved ratios of two of them with a bootstrap interval, and plain times.

ratio = interleaved_ratio(plain, ours, pairs=30, device="cpu", seed=0)
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from scipy import stats

from compile_remat.device.measure import synchronize

_RESAMPLES = 2000

T = TypeVar("T")


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


def with_cpu_seconds(work: Callable[[], T]) -> tuple[T, float]:
    """Returns the result of one call, and the CPU seconds that this process spends in the call."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def cpu_seconds(work: Callable[[], object]) -> float:
    """The CPU seconds alone."""
    return with_cpu_seconds(work)[1]


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
    """Percentile bootstrap of the median over pairs; a single pair is its own interval."""
    ratios = np.asarray(times_b, dtype=np.float64) / np.maximum(np.asarray(times_a, dtype=np.float64), 1.0)
    low = high = float(ratios[0])
    if len(ratios) > 1:
        sampled = stats.bootstrap((ratios,), np.median, n_resamples=_RESAMPLES, method="percentile", random_state=draw)
        low, high = sampled.confidence_interval
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
