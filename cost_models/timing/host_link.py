"""Measure the link between a device and its host, by the copies that offload makes: pinned memory, an engine for each direction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_remat._torch.offload.streams import Direction, Event, Streams, streams_of

COPY_BYTES, TOY_COPY_BYTES = 256 << 20, 1 << 20
COPIES = 4
ROUNDS = 3
PRODUCT, TOY_PRODUCT = 8192, 64
"""Length of the square product whose kernels run beside copies."""


@dataclass(frozen=True)
class HostLink:
    """Rates of copies in bytes per second.

    Attributes:
        alone: To the host and back, each while nothing else runs.
        both: The same while both directions copy at once.
        beside: The same, each beside products.
        slowdown: Part of a copy's time by which the products beside it take longer.
    """

    alone: tuple[int, int]
    both: tuple[int, int]
    beside: tuple[int, int]
    slowdown: float

    def figures(self) -> dict[str, Any]:
        """The figures of a device file: in a training step, copies run beside kernels."""
        out, back = self.beside
        return {"to_host_bytes_per_s": out, "from_host_bytes_per_s": back, "host_copy_slowdown": self.slowdown}

    def __str__(self) -> str:
        rates = [f"{out / 1e9:.1f} and {back / 1e9:.1f}" for out, back in (self.alone, self.both, self.beside)]
        return (
            f"copies to the host and back: {rates[0]} GB/s alone, {rates[1]} both at once, {rates[2]} beside products, "
            f"which take {self.slowdown:.1%} of the copies' time longer"
        )


def measured_link(device: torch.device, *, is_toy: bool = False) -> HostLink:
    """Measure the link of the device; needs 0.5 GiB on the device and on the host for about two seconds.

    Raises:
        HostCopyError: The host has no memory for the copies.
    """
    length = TOY_PRODUCT if is_toy else PRODUCT
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    factor = torch.randn(length, length, device=device, dtype=dtype)
    nbytes = TOY_COPY_BYTES if is_toy else COPY_BYTES
    return Measurement(streams_of(device), device, nbytes, lambda: torch.mm(factor, factor)).link()


class Measurement:
    """Times of copies and of work beside them.

    Args:
        nbytes: Bytes of one copy.
        work: Gives the device one kernel.
        clock: Returns seconds.
    """

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        nbytes: int,
        work: Callable[[], Any],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._streams, self._device, self._work, self._clock = streams, device, work, clock
        self._nbytes = nbytes * COPIES
        here = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._here = {direction: torch.empty_like(here) for direction in Direction}
        self._host = {direction: streams.empty_host(here) for direction in Direction}

    def link(self) -> HostLink:
        """All rates, each the median of `ROUNDS` rounds."""
        self._copied(tuple(Direction))  # touches the memory, wakes the device
        alone = {each: self._median(lambda each=each: self._copied((each,))) for each in Direction}  # type: ignore[misc]
        both_s = self._median(lambda: self._copied(tuple(Direction)))
        kernel_s = self._median(lambda: self._worked(1))
        beside, slowdowns = {}, []
        for each in Direction:
            calls = max(1, round(2 * alone[each] / kernel_s))  # the copies end before the work does
            work_s = self._median(lambda calls=calls: self._worked(calls))  # type: ignore[misc]
            pairs = [self._beside(each, calls) for _ in range(ROUNDS)]
            beside[each] = statistics.median(copy_s for copy_s, _ in pairs)
            slowdowns.append((statistics.median(both for _, both in pairs) - work_s) / beside[each])
        return HostLink(
            self._rates(alone),
            self._rates(dict.fromkeys(Direction, both_s)),
            self._rates(beside),
            min(1.0, max(0.0, *slowdowns)),
        )

    def _rates(self, seconds: dict[Direction, float]) -> tuple[int, int]:
        return int(self._nbytes / seconds[Direction.OUT]), int(self._nbytes / seconds[Direction.BACK])

    def _median(self, seconds: Callable[[], float]) -> float:
        return statistics.median(seconds() for _ in range(ROUNDS))

    def _copied(self, directions: Sequence[Direction]) -> float:
        """Seconds until the copies in these directions have ended."""
        start = self._clock()
        for event in [self._copies(direction) for direction in directions]:
            event.synchronize()
        return self._clock() - start

    def _worked(self, calls: int) -> float:
        """Seconds of some kernels."""
        start = self._clock()
        for _ in range(calls):
            self._work()
        self._streams.current(self._device).record().synchronize()
        return self._clock() - start

    def _beside(self, direction: Direction, calls: int) -> tuple[float, float]:
        """Seconds of copies, and of the kernels beside them."""
        start = self._clock()
        event = self._copies(direction)
        for _ in range(calls):
            self._work()
        event.synchronize()
        copy_s = self._clock() - start
        self._streams.current(self._device).record().synchronize()
        return copy_s, self._clock() - start

    def _copies(self, direction: Direction) -> Event:
        """The end of some copies, which begin now."""
        engine = self._streams.engine(self._device, direction)
        pair = self._host[direction], self._here[direction]
        target, source = pair if direction is Direction.OUT else reversed(pair)
        return [engine.copy(target, source, []) for _ in range(COPIES)][-1]
