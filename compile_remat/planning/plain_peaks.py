"""The largest peak of plain torch.compile that a step of this process has shown, by device: what a fraction is a fraction of.

It rises and never falls, so that a smaller batch, or a small graph behind a large one, has the bytes of the largest step.  It is
read into `Settings.plain_bytes` when a graph is compiled, and is thereby part of the cache key.  The side file of a compilation
has the graph's own plain peak, so a process that only hits caches goes through the same values.
"""

from __future__ import annotations

import threading

from compile_remat.report import Report

_LARGEST: dict[str, int] = {}
"""Bytes by the device's name in `Settings.device`."""

_LOCK = threading.Lock()


def largest_plain_bytes(device: str) -> int:
    """The largest plain peak so far; 0 before the first."""
    return _LARGEST.get(device, 0)


def note_plain_bytes(device: str, plain_bytes: int) -> int:
    """Take in the plain peak of a step; returns the largest so far."""
    with _LOCK:  # models may be compiled in several threads
        _LARGEST[device] = max(largest_plain_bytes(device), plain_bytes)
        return _LARGEST[device]


def note_plain_peak(device: str, report: Report) -> None:
    """Take in the plain peak of a step in which one graph runs, where its report has it."""
    if report.plain is not None:
        note_plain_bytes(device, report.plain.peak_bytes)


def forget_plain_peaks() -> None:
    """As in a new process."""
    _LARGEST.clear()
