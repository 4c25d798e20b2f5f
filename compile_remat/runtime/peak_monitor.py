"""The measured peak of a compiled graph, for its report: from the allocator where that is free, else under `measured_step`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_remat._torch.autograd_node import after_backward, can_be_differentiated, compiled_node, sequence_number
from compile_remat.device.measure import recorded
from compile_remat.report import amend, latest

TRIES = 3
"""So many steps of a graph are watched until the allocator shows a peak."""


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
    watched: list[Watched] = field(default_factory=list, repr=False)


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
    if len(step.watched) == 1:
        step.watched[0].note(step.peak_bytes)


class _Forwards:
    """How many forwards of watched graphs have begun in this process."""

    count = 0


class Watched:
    """A compiled graph whose peak goes into its report when it is known.

    A peak is known from the allocator where the step made its highest level rise, which the first one mostly does; the user's
    statistics are left as they are.  It counts when no other graph began before the backward ended.

    Args:
        graph_key: Names the report.
        read: Asks the allocator; None where there is none to ask for nothing.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        graph_key: str,
        report_dir: str | None,
        read: Callable[[], Reading] | None,
    ) -> None:
        self.compiled, self.graph_key, self.report_dir = compiled, graph_key, report_dir
        self.read = read
        self.tries = 0 if read is None else TRIES

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        step = _STEP.get()
        if step is not None:
            step.ran.append(self.graph_key)
            step.watched.append(self)
        if self.read is None:
            return self.compiled(*args)
        _Forwards.count += 1
        if not self.tries or step is not None or not can_be_differentiated(args):
            return self.compiled(*args)
        return self._watch(args, self.read)

    def _watch(self, args: Sequence[Any], read: Callable[[], Reading]) -> Any:
        self.tries -= 1
        before, count, since = read(), _Forwards.count, sequence_number()
        outputs = self.compiled(*args)
        node = compiled_node(outputs, since)
        if node is not None:
            after_backward(node, functools.partial(self._ended, read, before, count))
        return outputs

    def _ended(self, read: Callable[[], Reading], before: Reading, count: int) -> None:
        """Called by autograd when the backward has run."""
        after = read()
        if count == _Forwards.count and after.most_bytes > before.most_bytes:
            self.tries = 0
            self.note(after.most_bytes - before.now_bytes)

    def note(self, peak_bytes: int) -> None:
        """Put a measured peak into the report of the plan that runs; where that was forgotten, there is nothing to do."""
        report = latest(self.graph_key)
        if report is not None:
            amend(report, self.report_dir, measured_peak_bytes=peak_bytes)


def reader_of(device: torch.device) -> Callable[[], Reading] | None:
    """How to ask the allocator of a device; None where it keeps no statistics."""
    if device.type != "cuda":
        return None
    return lambda: Reading(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
