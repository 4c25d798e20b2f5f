"""The link to the host: rates of a simulated device are found again; on a CPU, the same copies really run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from compile_remat._torch.offload.streams import Direction
from compile_remat.cost_models.timing.host_link import HostLink, Measurement, measured_link

CPU = torch.device("cpu")
KERNEL_S = 0.001


@dataclass
class Simulated:
    """A device with a clock of its own: rates in bytes per second, and kernels that take longer by a part of copies beside them."""

    rates: dict[Direction, float]
    slowdown: float = 0.0
    now: float = 0.0
    free: dict[object, float] = field(default_factory=dict)

    def current(self, device: torch.device) -> Queue:
        return Queue(self, "kernels")

    def engine(self, device: torch.device, direction: Direction) -> Queue:
        return Queue(self, direction)

    def empty_host(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    def run(self, queue: object, seconds: float) -> None:
        self.free[queue] = max(self.now, self.free.get(queue, 0.0)) + seconds

    def work(self) -> None:
        self.run("kernels", KERNEL_S)


@dataclass
class Queue:
    device: Simulated
    name: object
    at: float = 0.0

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[object]) -> Queue:
        assert isinstance(self.name, Direction) and not after
        seconds = source.nbytes / self.device.rates[self.name]
        self.device.run(self.name, seconds)
        self.device.run("kernels", self.device.slowdown * seconds)
        return self.record()

    def record(self) -> Queue:
        return Queue(self.device, self.name, self.device.free.get(self.name, 0.0))

    def wait(self, event: Queue) -> None:
        raise AssertionError("no stream waits")

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)


def test_rates_and_slowdown_of_a_device_are_found() -> None:
    device = Simulated({Direction.OUT: 50e6, Direction.BACK: 25e6}, slowdown=0.02)
    link = Measurement(device, CPU, 1_000_000, device.work, lambda: device.now).link()
    assert link.alone == pytest.approx((50e6, 25e6), rel=1e-6)
    assert link.both == pytest.approx((25e6, 25e6), rel=1e-6)  # until the slower one has ended
    assert link.beside == pytest.approx((50e6, 25e6), rel=1e-6)
    assert link.slowdown == pytest.approx(0.02)
    assert "2.0% of the copies' time" in str(link)


def test_figures_of_a_device_file_are_those_beside_kernels() -> None:
    link = HostLink((60, 50), (40, 40), (55, 45), 0.01)
    assert link.figures() == {"to_host_bytes_per_s": 55, "from_host_bytes_per_s": 45, "host_copy_slowdown": 0.01}


def test_copies_of_a_cpu_are_measured() -> None:
    link = measured_link(CPU, is_toy=True)
    assert all(rate > 0 for pair in (link.alone, link.both, link.beside) for rate in pair) and 0 <= link.slowdown <= 1
