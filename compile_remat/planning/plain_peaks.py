"""The largest peak of plain torch.compile in any step of this process, by device; a budget's fraction multiplies this peak.

The peak rises and never falls, so that a smaller batch, or a small graph after a large one, has the bytes of the largest step.
`Settings.plain_bytes` takes the peak when a graph is compiled, so it is part of the cache key.  The side file of a compilation
holds the graph's own plain peak, so a process that only hits caches goes through the same values.
"""

from __future__ import annotations

import threading

from compile_remat.report import Report

_LARGEST: dict[str, int] = {}
"""Peak bytes by the device's name in `Settings.device`."""

_LOCK = threading.Lock()


def largest_plain_bytes(device: str) -> int:
    """Returns the largest plain peak so far, in bytes; 0 before the first."""
    return _LARGEST.get(device, 0)


def note_plain_bytes(device: str, plain_bytes: int) -> int:
    """Record the plain peak of a step; returns the largest so far."""
    with _LOCK:  # models may be compiled in several threads
        _LARGEST[device] = max(largest_plain_bytes(device), plain_bytes)
        return _LARGEST[device]


def note_plain_peak(device: str, report: Report) -> None:
    """Record the plain peak of a step in which one graph runs, if its report has one."""
    if report.plain is not None:
        note_plain_bytes(device, report.plain.peak_bytes)


def forget_plain_peaks() -> None:
    """Forget all plain peaks, as in a new process."""
    _LARGEST.clear()
