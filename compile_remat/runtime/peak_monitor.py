"""Measures the peak of a compiled graph for its report: from the allocator's statistics if it has any, or in a `measured_step`."""

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
"""Calls of a region for which the allocator's statistics are read, at most, until one of them shows a peak."""


@dataclass(frozen=True)
class Reading:
    """The allocator's statistics: bytes in use now, and the most bytes in use since they were last reset."""

    now_bytes: int
    most_bytes: int


@dataclass
class MeasuredStep:
    """The result of a `measured_step`.

    Attributes:
        peak_bytes: The most bytes in use at once that the body allocated; None until the body has ended.
        ran: Report keys of the graphs that ran in the body, in order; a graph that ran twice appears twice.
    """

    peak_bytes: int | None = None
    ran: list[str] = field(default_factory=list)
    monitors: list[PeakMonitor] = field(default_factory=list, repr=False)


_STEP: ContextVar[MeasuredStep | None] = ContextVar("compile_remat measured step", default=None)


@contextmanager
def measured_step(device: torch.device | str | None = None) -> Iterator[MeasuredStep]:
    """Measure one training step, and write its peak into the report of the graph that ran in the step.

    The peak counts all bytes that the body allocates above the level at its start: set gradients to None before.  Measure a step
    that compiles nothing.  If several graphs ran, or one graph several times, the peak is the step's and no report gets it.

    Args:
        device: The device whose memory is measured; by default the current CUDA device if there is one, else the CPU.  On CUDA
            the allocator's peak statistics are reset; on CPU a profiler runs, so no other profiler may run.

    Raises:
        ValueError: The memory of that device cannot be measured.

    Examples:
        >>> layers = [layer for _ in range(20) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
        >>> model, batch = torch.nn.Sequential(*layers), torch.randn(2048, 256)
        >>> compiled = torch.compile(model, backend="remat", options={"memory_budget": "30MiB"})
        >>> compiled(batch).mean().backward()  # compiles
        >>> model.zero_grad()  # sets gradients to None
        >>> with compile_remat.measured_step() as step:
        ...     compiled(batch).mean().backward()
        >>> f"{step.peak_bytes / 2**20:.1f} MiB"
        '29.0 MiB'
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
        step.monitors[0].note(step.peak_bytes, step.ran[0])


class PeakMonitor(Hook):
    """The hook that writes the measured peak of a region into its report.

    The allocator shows the peak of a call that raised its highest level, as the first call usually does; the hook leaves the user's
    statistics as they are.  The peak counts only if no other forward began before the backward ended.  In the first call, Inductor
    tunes its Triton kernels, with an extra live buffer of the size of the L2 cache, and libraries allocate their workspaces: the
    report says so.

    Args:
        graph_key: Key of the report.
        read: Reads the allocator's statistics; None if it keeps none, or if no call is to be measured.
    """

    num_forwards = 0
    """Forwards of all monitored regions that have begun in this process."""

    def __init__(self, graph_key: str, report_dir: str | None, read: Callable[[], Reading] | None) -> None:
        self.graph_key, self.report_dir, self.read = graph_key, report_dir, read
        self.tries = 0 if read is None else TRIES
        self.num_calls = 0

    def called(self, region: CompiledRegion) -> None:
        """Count the call, and add the region to the current `measured_step`, if any."""
        PeakMonitor.num_forwards += 1
        self.num_calls += 1
        step = _STEP.get()
        if step is not None:
            step.ran.append(self.graph_key)
            step.monitors.append(self)

    def before_forward(self, call: CallInFlight, args: Sequence[Any]) -> None:
        """Read the allocator's statistics before the step."""
        if self.read is not None and self.tries and _STEP.get() is None:
            self.tries -= 1
            call.notes[self] = self.read(), PeakMonitor.num_forwards

    def after_forward(self, call: CallInFlight, args: Sequence[Any], node: Any) -> None:
        """Name the plan that ran to the current `measured_step`: for larger sizes the region may have taken another one."""
        step = _STEP.get()
        if step is not None and step.monitors[-1:] == [self]:
            step.ran[-1] = call.running.report.graph_key

    def after_backward(self, call: CallInFlight) -> None:
        """Read the allocator's statistics again; note the peak if this call raised the highest level."""
        before, num_forwards = call.notes.get(self, (None, 0))
        if self.read is None or before is None:
            return
        after = self.read()
        if num_forwards == PeakMonitor.num_forwards and after.most_bytes > before.most_bytes:
            self.tries = 0
            key = call.running.report.graph_key
            self.note(after.most_bytes - before.now_bytes, key, in_first_call=self.num_calls == 1)

    def note(self, peak_bytes: int, graph_key: str, *, in_first_call: bool = False) -> None:
        """Write a measured peak into the report of the plan that ran; do nothing if the report was cleared."""
        report = latest(graph_key)
        if report is not None:
            amend(report, self.report_dir, measured_peak_bytes=peak_bytes, measured_in_first_call=in_first_call)


def reader_of(device: torch.device) -> Callable[[], Reading] | None:
    """Returns a function that reads the allocator's statistics of a device; None if it keeps none (any device but CUDA)."""
    if device.type != "cuda":
        return None
    return lambda: Reading(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
