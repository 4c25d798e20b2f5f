"""Streams of copies between a device and the host: on CUDA, streams of the GPU; on the CPU, two threads.

A device has two copy engines, one for each direction, and each engine runs its copies one after the other.  The operators
(`offload_ops`) order copies and kernels through three calls alone: `Stream.record`, `Stream.wait` and `Engine.copy`.  On the CPU,
copies really run beside the kernels, so that a missing wait gives wrong numbers there too.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from compile_remat._torch.offload.host_memory import empty_mapped, empty_pinned, span_of
from compile_remat._util.units import format_bytes


class HostCopyError(RuntimeError):
    """A copy between device and host failed, or there was no host memory for it."""


class Direction(StrEnum):
    """A copy engine of a device."""

    OUT = "device to host"
    BACK = "host to device"


class Event(Protocol):
    """A point in the work of a stream or an engine."""

    def synchronize(self) -> None:
        """Block this thread until the work before the event has ended; raises HostCopyError for a copy that failed."""


class Stream(Protocol):
    """The kernels of a thread, in the order in which it calls them."""

    def record(self) -> Event:
        """Returns the event that ends with the kernels called so far."""

    def wait(self, event: Any) -> None:
        """Kernels that are called later begin once `event` has ended."""


class Engine(Protocol):
    """Copies in one direction, which run one after the other."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]) -> Event:
        """Copy between tensors of equal layout once the events `after` have ended, and return the event that ends with the copy.

        Both tensors must live until then.

        Raises:
            HostCopyError: The copy cannot begin.  One that fails later raises where its end is waited for.
        """


class Streams(Protocol):
    """The streams of a kind of device."""

    def current(self, device: torch.device) -> Stream:
        """The stream in which this thread runs kernels now."""

    def engine(self, device: torch.device, direction: Direction) -> Engine:
        """The copy engine of a device for one direction."""

    def empty_host(self, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised host memory with the layout of a tensor; raises HostCopyError if there is none."""


class CudaStream:
    """A CUDA stream, for kernels or for copies."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self) -> torch.cuda.Event:
        """See `Stream.record`."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """See `Stream.wait`."""
        self._stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        """See `Engine.copy`."""
        for event in after:
            self.wait(event)
        try:
            with torch.cuda.stream(self._stream):
                elements(target).copy_(elements(source), non_blocking=True)
            return self.record()
        except RuntimeError as error:
            raise HostCopyError(f"compile_remat: a copy between device and host failed: {error}") from error


class CudaStreams:
    """Two streams of their own for each CUDA device, made at the first copy.

    Memory of the device is never handed to another stream: sources and targets of copies belong to the stream of the kernels, which
    waits for a copy before the memory is freed.  So ``Tensor.record_stream``, which would keep memory for longer, is not needed.
    """

    def __init__(self) -> None:
        self._engines: dict[tuple[int, Direction], CudaStream] = {}
        self._lock = threading.Lock()

    def current(self, device: torch.device) -> CudaStream:
        """See `Streams.current`."""
        return CudaStream(torch.cuda.current_stream(device))

    def engine(self, device: torch.device, direction: Direction) -> CudaStream:
        """See `Streams.engine`."""
        index = torch.cuda.current_device() if device.index is None else device.index
        with self._lock:
            if (index, direction) not in self._engines:
                self._engines[index, direction] = CudaStream(torch.cuda.Stream(index))
            return self._engines[index, direction]

    def empty_host(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory, see `Streams.empty_host`."""
        return _empty(empty_pinned, like)


class ThreadEvent:
    """The end of a copy in another thread.

    Attributes:
        error: The error of a copy that failed, without the frames that hold its tensors.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._done = threading.Event()

    def end(self) -> None:
        """Wake those that wait."""
        self._done.set()

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self._done.wait()
        if self.error is not None:
            raise HostCopyError(f"compile_remat: a copy between device and host failed: {self.error}") from self.error


class ThreadEngine:
    """Copies of a thread, which starts with the first copy and ends with the process.

    Attributes:
        before_copy: Called in the thread before each copy; tests set delays here.
    """

    def __init__(self, name: str) -> None:
        self.before_copy: Callable[[], None] = _nothing
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> ThreadEvent:
        """See `Engine.copy`."""
        event, tensors = ThreadEvent(), [target, source]

        def run() -> None:
            try:
                for earlier in after:
                    earlier.synchronize()
                self.before_copy()
                _copy_memory(*tensors)
            except BaseException as error:  # whoever waits for the copy raises it
                event.error = error.with_traceback(None)
            tensors.clear()  # before anyone is woken, who may count on their memory at once
            event.end()

        self._give(run)
        return event

    def drain(self) -> None:
        """Wait until the copies given so far have ended.  A copy that failed is raised where its own event is waited for."""
        last = threading.Event()
        self._give(last.set)
        last.wait()

    def _give(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            work()
            del work  # its tensors


class HostStream:
    """The kernels of a thread on the CPU, each of which has ended when the next is called."""

    def record(self) -> ThreadEvent:
        """See `Stream.record`."""
        event = ThreadEvent()
        event.end()
        return event

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        event.synchronize()


class ThreadStreams:
    """Copies of the CPU, as "device", to memory outside of torch's allocator, as "host"."""

    def __init__(self) -> None:
        self._engines = _engines()

    def current(self, device: torch.device) -> HostStream:
        """See `Streams.current`."""
        return HostStream()

    def engine(self, device: torch.device, direction: Direction) -> ThreadEngine:
        """See `Streams.engine`."""
        return self._engines[direction]

    def empty_host(self, like: torch.Tensor) -> torch.Tensor:
        """Mapped memory, see `Streams.empty_host`."""
        return _empty(empty_mapped, like)

    def drain(self) -> None:
        """Wait until all copies given so far have ended."""
        for engine in self._engines.values():
            engine.drain()

    def restart(self) -> None:
        """Make new threads, as in a forked process, which has none of its parent's."""
        self._engines = _engines()


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements from the first to the last of a tensor in memory, as a vector: padding too, and each repeated element once."""
    return tensor.as_strided((span_of(tensor),), (1,))


def streams_of(device: torch.device) -> Streams:
    """The streams of a device.

    Raises:
        NotImplementedError: Tensors of such a device are not offloaded.
    """
    if device.type not in _STREAMS:
        raise NotImplementedError(f"compile_remat offloads tensors of CUDA devices and CPUs, not of {device}")
    return _STREAMS[device.type]


@contextmanager
def streams_replaced(kind: str, streams: Streams) -> Iterator[None]:
    """Inside, `streams` are those of the devices of one kind, such as "cpu"."""
    kept = _STREAMS[kind]
    _STREAMS[kind] = streams
    try:
        yield
    finally:
        _STREAMS[kind] = kept


def _empty(make: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    try:
        return make(like)
    except (OSError, RuntimeError) as error:
        raise HostCopyError(
            f"compile_remat: the host has no memory for an offloaded tensor of {format_bytes(like.nbytes)}: {error}"
        ) from error


def _copy_memory(target: torch.Tensor, source: torch.Tensor) -> None:
    to, from_ = elements(target), elements(source)
    ctypes.memmove(to.data_ptr(), from_.data_ptr(), from_.nbytes)


def _engines() -> dict[Direction, ThreadEngine]:
    return {direction: ThreadEngine(f"compile-remat {direction}") for direction in Direction}


def _nothing() -> None:
    return None


_THREADS = ThreadStreams()
_STREAMS: dict[str, Streams] = {"cuda": CudaStreams(), "cpu": _THREADS}

atexit.register(_THREADS.drain)  # daemon threads stop with the interpreter, and nothing may wait for them then
os.register_at_fork(before=_THREADS.drain, after_in_child=_THREADS.restart)
