"""The measured peak of a compiled graph, for its report: from the allocator where that is free, else under `measured_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_remat.device.measure import recorded
from compile_remat.report import amend, latest
from compile_remat.runtime.region import CallInFlight, CompiledRegion, Hook

TRIES = 3
"""Calls of a region for which the allocator is read, at most, until one of them shows a peak."""


@dataclass(frozen=True)
class Reading:
    """What the allocator says: bytes in use now, and the most that were since its statistics were last reset."""

    now_bytes: int
    most_bytes: int


@dataclass
class MeasuredStep:
    """What `measured_step` found.

    Attributes:
        peak_bytes: The most bytes in use at once that the body allocated; None until it has ended.
        ran: The graphs that ran in it, in order, by the keys of their reports; a graph that ran twice is there twice.
    """

    peak_bytes: int | None = None
    ran: list[str] = field(default_factory=list)
    monitors: list[PeakMonitor] = field(default_factory=list, repr=False)


_STEP: ContextVar[MeasuredStep | None] = ContextVar("compile_remat measured step", default=None)


@contextmanager
def measured_step(device: torch.device | str | None = None) -> Iterator[MeasuredStep]:
    """Measure one training step, and put its peak into the report of the graph that ran in it.

        with compile_remat.measured_step() as step:
            model(x).sum().backward()
        step.peak_bytes

    Everything that the body allocates counts, above the level at its start: set gradients to None before.  Take a step that
    compiles nothing.  Where several graphs ran, or one several times, the peak is the step's alone and no report has it.

    Args:
        device: Whose memory; by default the current CUDA device where there is one, else the CPU.  On CUDA the allocator's peak
            statistics are reset; on CPU a profiler runs, so that no other may.

    Raises:
        ValueError: Memory of that device cannot be measured.
    """
    step = MeasuredStep()
    token = _STEP.set(step)
    try:
        with recorded(device or ("cuda" if torch.cuda.is_available() else "cpu")) as peaks:
            yield step
    finally:
        _STEP.reset(token)
    step.peak_bytes = peaks[0].peak_bytes
    if len(step.monitors) == 1:
        step.monitors[0].note(step.peak_bytes)


class PeakMonitor(Hook):
    """The hook that puts the measured peak of a region into its report.

    The allocator knows the peak of a call that raised its highest level, as the first one mostly does; the user's statistics are
    left as they are.  The peak counts when no other forward began before the backward ended.  Inductor tunes its Triton kernels in
    the first call, with a buffer of the size of the L2 cache beside what is alive, and libraries take their workspaces then: the
    report says so.

    Args:
        graph_key: Names the report.
        read: Asks the allocator; None where it keeps no statistics, or where no call is to be measured.
    """

    num_forwards = 0
    """Forwards of all monitored regions that have begun in this process."""

    def __init__(self, graph_key: str, report_dir: str | None, read: Callable[[], Reading] | None) -> None:
        self.graph_key, self.report_dir, self.read = graph_key, report_dir, read
        self.tries = 0 if read is None else TRIES
        self.num_calls = 0

    def called(self, region: CompiledRegion) -> None:
        """Tell a `measured_step` that the region runs in it."""
        PeakMonitor.num_forwards += 1
        self.num_calls += 1
        step = _STEP.get()
        if step is not None:
            step.ran.append(self.graph_key)
            step.monitors.append(self)

    def before_forward(self, call: CallInFlight, args: Sequence[Any]) -> None:
        """Read the level of the allocator."""
        if self.read is not None and self.tries and _STEP.get() is None:
            self.tries -= 1
            call.notes[self] = self.read(), PeakMonitor.num_forwards

    def after_backward(self, call: CallInFlight) -> None:
        """Read it again."""
        before, num_forwards = call.notes.get(self, (None, 0))
        if self.read is None or before is None:
            return
        after = self.read()
        if num_forwards == PeakMonitor.num_forwards and after.most_bytes > before.most_bytes:
            self.tries = 0
            self.note(after.most_bytes - before.now_bytes, in_first_call=self.num_calls == 1)

    def note(self, peak_bytes: int, *, in_first_call: bool = False) -> None:
        """Put a measured peak into the report of the running plan; where that was forgotten, there is nothing to do."""
        report = latest(self.graph_key)
        if report is not None:
            amend(report, self.report_dir, measured_peak_bytes=peak_bytes, measured_in_first_call=in_first_call)


def reader_of(device: torch.device) -> Callable[[], Reading] | None:
    """How to ask the allocator of a device; None where it keeps no statistics."""
    if device.type != "cuda":
        return None
    return lambda: Reading(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
