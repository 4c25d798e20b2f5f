"""Peaks of known allocation patterns, and ratio intervals of synthetic clocks."""

from collections.abc import Callable

import pytest
import torch

from compile_remat._torch.allocator_events import AllocationEvent
from compile_remat.device.measure import Peak, interleaved_ratio, peak_bytes, recorded, replay, step_times_ns

MIB = 1 << 20


def _known_pattern(device: str) -> torch.Tensor:
    """1, 1+2, 2, 2+4, 4, 4+1 MiB live: 6 at the peak, the last one returned."""
    first = torch.empty(1 * MIB, dtype=torch.uint8, device=device)
    second = torch.empty(2 * MIB, dtype=torch.uint8, device=device)
    del first
    third = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    del second, third
    return torch.empty(1 * MIB, dtype=torch.uint8, device=device)


def test_known_pattern_is_exact() -> None:
    peak = peak_bytes(lambda: _known_pattern("cpu"), "cpu")
    assert peak == Peak(peak_bytes=6 * MIB, end_bytes=1 * MIB, allocations=4, requested_bytes=6 * MIB)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_known_pattern_is_exact_on_cuda() -> None:
    peak = peak_bytes(lambda: _known_pattern("cuda"), "cuda")
    assert peak == Peak(peak_bytes=6 * MIB, end_bytes=1 * MIB, allocations=4, requested_bytes=6 * MIB)


def test_what_was_there_before_does_not_count() -> None:
    held = [torch.empty(8 * MIB, dtype=torch.uint8)]

    def free_then_allocate() -> None:
        held.clear()
        torch.empty(2 * MIB, dtype=torch.uint8)

    assert peak_bytes(free_then_allocate, "cpu").peak_bytes == 2 * MIB


def test_backward_counts_gradients() -> None:
    weight = torch.ones(MIB // 4, requires_grad=True)
    peak = peak_bytes(lambda: (weight * 2).sum().backward(), "cpu")
    assert peak.end_bytes == MIB
    assert weight.grad is not None


def test_replay_reuses_addresses() -> None:
    sizes = [(0, 10, 1), (1, 5, 2), (2, -10, 1), (3, 7, 1), (4, -99, 3)]
    assert replay([AllocationEvent(*each) for each in sizes]) == Peak(15, 12, 3, 15)


def test_what_a_block_allocates_is_recorded() -> None:
    with recorded("cpu") as peaks:
        held = torch.empty(MIB, dtype=torch.uint8)
        _known_pattern("cpu")
        assert peaks == []
    assert peaks == [Peak(peak_bytes=7 * MIB, end_bytes=1 * MIB, allocations=5, requested_bytes=7 * MIB)]
    assert held.nbytes == MIB


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="'meta'"):
        peak_bytes(lambda: None, "meta")


class _Clock:
    """A clock that only the timed functions move."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def takes(self, *times_ns: int) -> Callable[[], None]:
        """A function whose calls take these times in turn."""
        calls = iter(range(1 << 30))

        def run() -> None:
            self.now_ns += times_ns[next(calls) % len(times_ns)]

        return run


def test_ratio_of_equal_functions_contains_one() -> None:
    clock = _Clock()
    a, b = clock.takes(100, 104, 97, 101, 99), clock.takes(101, 98, 103)
    ratio = interleaved_ratio(a, b, pairs=30, device="cpu", seed=0, clock=clock)
    assert ratio.low <= 1.0 <= ratio.high
    assert ratio.pairs == 30


def test_ratio_is_b_over_a_and_deterministic() -> None:
    def measured() -> object:
        clock = _Clock()
        return interleaved_ratio(clock.takes(100, 110), clock.takes(150, 160, 170), 30, "cpu", seed=3, clock=clock)

    first = measured()
    assert first == measured()
    clock = _Clock()
    exact = interleaved_ratio(clock.takes(100), clock.takes(150), 5, "cpu", seed=0, clock=clock)
    assert (exact.low, exact.median, exact.high) == (1.5, 1.5, 1.5)
    assert (exact.median_a_ns, exact.median_b_ns) == (100, 150)
    assert str(exact) == "1.500 [1.500, 1.500]"


def test_both_orders_occur() -> None:
    order: list[str] = []
    interleaved_ratio(lambda: order.append("a"), lambda: order.append("b"), 20, "cpu", seed=0)
    firsts = set(order[::2])
    assert firsts == {"a", "b"}
    assert order.count("a") == order.count("b") == 20


def test_no_pairs_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        interleaved_ratio(lambda: None, lambda: None, pairs=0, device="cpu", seed=0)


def test_step_times_by_the_given_clock() -> None:
    clock = _Clock()
    assert step_times_ns(clock.takes(5, 7), 3, "cpu", clock) == [5, 7, 5]
