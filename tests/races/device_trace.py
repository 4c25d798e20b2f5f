"""The events of a step that a device really ran, as a trace of `clocks`: copies, marks and waits of offload, and memory.

On CUDA, ``torch.cuda._gpu_trace`` calls back for each event that is recorded or waited for and for each block of memory.  It does
not say which part of a program asked, so `NotedStreams` stand around the product's own: events count while one of their calls runs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from compile_remat._torch.offload.streams import Direction, Engine, Stream, Streams
from tests.races.clocks import Access, Event, Mark, Wait

KERNELS = "kernels"


class DeviceTrace:
    """Builds a trace from calls of a device.  A block of memory has one byte here, as its size is not told.

    Attributes:
        trace: The events so far, in order.
    """

    def __init__(self) -> None:
        self.trace: list[Event] = []
        self._agents: dict[int, str] = {}
        self._events: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        self._marks, self._waits, self._storages = itertools.count(), itertools.count(), itertools.count()
        self._calls = threading.local()

    def named(self, stream: int, agent: str) -> None:
        """Give a stream's handle a name; one without is a stream of kernels."""
        self._agents[stream] = agent

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Inside, in this thread, events are those of offload."""
        self._calls.are_ours = True
        try:
            yield
        finally:
            self._calls.are_ours = False

    def record(self, event: int, stream: int) -> None:
        """An event is recorded in a stream."""
        if self._is_ours:
            mark = Mark(self._agents.get(stream, KERNELS), next(self._marks))
            self._events[event] = mark.number
            self.trace.append(mark)

    def wait(self, event: int, stream: int) -> None:
        """A stream waits for an event."""
        if self._is_ours:
            agent = self._agents.get(stream, KERNELS)
            self.trace.append(Wait(agent, self._events[event], "", next(self._waits)))

    def take(self, address: int) -> None:
        """A block of memory is handed out."""
        self._blocks[address] = next(self._storages)
        self._access(KERNELS, "take", address, writes=True)

    def free(self, address: int) -> None:
        """A block of memory is taken back; one from before the trace is no event."""
        if address in self._blocks:
            self._access(KERNELS, "free", address, writes=True)
            del self._blocks[address]

    def copy(self, agent: str, address: int, *, writes: bool) -> None:
        """An engine's copy reads or writes a block of the device."""
        self._blocks.setdefault(address, next(self._storages))
        self._access(agent, "copy", address, writes=writes)

    @property
    def _is_ours(self) -> bool:
        return getattr(self._calls, "are_ours", False)

    def _access(self, agent: str, label: str, address: int, *, writes: bool) -> None:
        self.trace.append(Access(agent, label, self._blocks[address], 0, 1, writes))


def listening(found: DeviceTrace) -> None:
    """Let CUDA call back from now on, until the process ends."""
    from torch.cuda import _gpu_trace as gpu_trace

    torch._C._activate_gpu_trace()
    gpu_trace.register_callback_for_event_record(found.record)
    gpu_trace.register_callback_for_event_wait(found.wait)
    gpu_trace.register_callback_for_memory_allocation(found.take)
    gpu_trace.register_callback_for_memory_deallocation(found.free)


class NotedStreams:
    """The product's streams of CUDA; each of their calls is known to a trace as one of offload."""

    def __init__(self, streams: Streams, found: DeviceTrace) -> None:
        self._streams, self._found = streams, found

    def current(self, device: torch.device) -> Any:
        """See `Streams.current`."""
        return _Noted(self._streams.current(device), self._found, KERNELS)

    def engine(self, device: torch.device, direction: Direction) -> Any:
        """See `Streams.engine`."""
        engine: Any = self._streams.engine(device, direction)
        self._found.named(engine._stream.cuda_stream, direction)
        return _Noted(engine, self._found, direction)

    def empty_host(self, like: torch.Tensor) -> torch.Tensor:
        """See `Streams.empty_host`."""
        return self._streams.empty_host(like)


class _Noted:
    """A stream or an engine whose calls are those of offload."""

    def __init__(self, stream: Stream | Engine | Any, found: DeviceTrace, agent: str) -> None:
        self._stream, self._found, self._agent = stream, found, agent

    def record(self) -> Any:
        """See `Stream.record`."""
        return self._called(self._stream.record)

    def wait(self, event: Any) -> None:
        """See `Stream.wait`."""
        self._called(lambda: self._stream.wait(event))

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]) -> Any:
        """See `Engine.copy`."""
        is_out = source.device.type != "cpu"
        block = (source if is_out else target).untyped_storage().data_ptr()
        self._called(lambda: [self._stream.wait(event) for event in after])
        self._found.copy(self._agent, block, writes=not is_out)
        return self._called(lambda: self._stream.copy(target, source, ()))

    def _called(self, call: Callable[[], Any]) -> Any:
        with self._found.calls():
            return call()


def order(trace: Sequence[Event]) -> list[tuple[str, ...]]:
    """The part of a step that all its traces have in common, in order.

    These are the waits, the marks that somebody waits for, and the memory that is taken in the step and that copies use.
    """
    accesses = [event for event in trace if isinstance(event, Access)]
    copied = {event.storage for event in accesses if event.label == "copy"}
    copied &= {event.storage for event in accesses if event.label == "take"}
    awaited = {event.mark for event in trace if isinstance(event, Wait)}
    storages, marks = dict[int, int](), dict[int, int]()
    found: list[tuple[str, ...]] = []
    for event in trace:
        match event:
            case Access() if event.storage in copied and event.label in ("take", "copy", "free"):
                number = storages.setdefault(event.storage, len(storages))
                found.append((event.agent, event.label, str(number)))
            case Mark() if event.number in awaited:
                found.append((event.agent, "mark", str(marks.setdefault(event.number, len(marks)))))
            case Wait():
                found.append((event.agent, "wait", str(marks[event.mark])))
    return found
