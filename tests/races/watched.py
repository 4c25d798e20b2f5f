"""Streams, engines and events that note what they are asked for, in the place of those of a device; see `clocks`.

Copies have no numbers to bring: the kernels of watched code do not run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from compile_remat._torch.offload.host_memory import span_of
from compile_remat._torch.offload.streams import Direction
from tests.races.clocks import HOST, Access, Event, Mark, Wait


class Watch:
    """The events of a step.

    Attributes:
        trace: The events so far, in order.
        asking: The operator of offload that runs now; empty between operators, where only a ticket that dies waits.
        stream: The agent whose kernels run now.
    """

    def __init__(self) -> None:
        self.trace: list[Event] = []
        self.asking = ""
        self.stream = "kernels"
        self._marks, self._waits, self._storages = itertools.count(), itertools.count(), itertools.count()
        self._known: dict[int, int] = {}
        self._on_host = set[int]()

    def ran(self, label: str) -> None:
        """Called before each kernel and each operator."""

    def access(self, agent: str, label: str, tensor: torch.Tensor, *, writes: bool) -> None:
        """Note that an agent reads or writes the elements of a tensor, from the first to the last in memory."""
        if tensor.numel():
            first = tensor.storage_offset() * tensor.dtype.itemsize
            end = first + span_of(tensor) * tensor.dtype.itemsize
            self.trace.append(Access(agent, label, self._storage(tensor), first, end, writes))

    def read_by_host(self, tensor: torch.Tensor) -> None:
        """Note that Python code reads a tensor that is on the host; a tensor of the device it cannot read."""
        if self._storage(tensor) in self._on_host:
            self.access(HOST, "hook", tensor, writes=False)

    def mark(self, agent: str) -> WatchedEvent:
        """The event that ends with what an agent was given so far."""
        event = Mark(agent, next(self._marks))
        self.trace.append(event)
        return WatchedEvent(self, event)

    def wait(self, agent: str, event: WatchedEvent) -> None:
        """Let an agent wait for an event."""
        kind = f"{self.asking or 'unfinished'}: {_role(agent)} for {_role(event.mark.agent)}"
        self.trace.append(Wait(agent, event.mark.number, kind, next(self._waits)))

    def empty(self, elements: int, dtype: torch.dtype, *, on_host: bool = False) -> torch.Tensor:
        """Uninitialised memory whose end is noted, too.

        The host's allocator, pinned or mapped, hands a block on behind the copies of the block: its ends are no events.
        """
        nbytes = max(1, elements) * dtype.itemsize
        array = np.empty(nbytes, dtype=np.uint8)
        address, storage, owner = array.ctypes.data, next(self._storages), self.stream
        self._known[address] = storage
        whole = Access(owner, "take", storage, 0, nbytes, writes=True)
        if on_host:
            self._on_host.add(storage)
        else:
            self.trace.append(whole)

        def freed() -> None:
            del self._known[address]
            if not on_host:
                self.trace.append(Access(owner, "free", storage, 0, nbytes, writes=True))

        weakref.finalize(array, freed).atexit = False
        return torch.from_numpy(array).view(dtype)[:elements]

    def _storage(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage; memory that other code made has one as long as its address is not taken anew."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._known:
            self._known[address] = next(self._storages)
        return self._known[address]

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Inside, kernels run in another stream."""
        kept, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = kept


def _role(agent: str) -> str:
    return agent if agent in (HOST, *Direction) else "kernels"


class WatchedEvent:
    """A mark of a trace."""

    def __init__(self, watch: Watch, mark: Mark) -> None:
        self.watch, self.mark = watch, mark

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self.watch.wait(HOST, self)


class WatchedStream:
    """The kernels of a stream."""

    def __init__(self, watch: Watch, agent: str) -> None:
        self.watch, self.agent = watch, agent

    def record(self) -> WatchedEvent:
        """See `Stream.record`."""
        return self.watch.mark(self.agent)

    def wait(self, event: WatchedEvent) -> None:
        """See `Stream.wait`."""
        self.watch.wait(self.agent, event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[WatchedEvent]) -> WatchedEvent:
        """See `Engine.copy`."""
        for event in after:
            self.wait(event)
        self.watch.access(self.agent, "copy", source, writes=False)
        self.watch.access(self.agent, "copy", target, writes=True)
        return self.record()


class WatchedStreams:
    """The streams of all devices: an engine for each direction, and the stream that the watch says."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def current(self, device: torch.device) -> WatchedStream:
        """See `Streams.current`."""
        return WatchedStream(self.watch, self.watch.stream)

    def engine(self, device: torch.device, direction: Direction) -> WatchedStream:
        """See `Streams.engine`."""
        return WatchedStream(self.watch, direction)

    def empty_host(self, like: torch.Tensor) -> torch.Tensor:
        """See `Streams.empty_host`."""
        return self.watch.empty(span_of(like), like.dtype, on_host=True).as_strided(like.size(), like.stride())
