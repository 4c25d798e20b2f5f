"""Peaks of known allocation patterns."""

import pytest
import torch

from compile_remat._torch.allocator_events import AllocationEvent
from compile_remat.device.measure import Peak, peak_bytes, recorded, replay

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
    assert peak == Peak(peak_bytes=6 * MIB, end_bytes=1 * MIB, requested_bytes=6 * MIB)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_known_pattern_is_exact_on_cuda() -> None:
    peak = peak_bytes(lambda: _known_pattern("cuda"), "cuda")
    assert peak == Peak(peak_bytes=6 * MIB, end_bytes=1 * MIB, requested_bytes=6 * MIB)


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
    assert replay([AllocationEvent(*each) for each in sizes]) == Peak(15, 12, 15)


def test_what_another_thread_frees_counts_until_its_address_is_allocated_again() -> None:
    """The profiler records no event for such a free."""
    assert replay([AllocationEvent(*each) for each in [(0, 10, 1), (1, 5, 2), (2, 8, 1)]]) == Peak(15, 13, 15)


def test_what_a_block_allocates_is_recorded() -> None:
    with recorded("cpu") as peaks:
        held = torch.empty(MIB, dtype=torch.uint8)
        _known_pattern("cpu")
        assert peaks == []
    assert peaks == [Peak(peak_bytes=7 * MIB, end_bytes=1 * MIB, requested_bytes=7 * MIB)]
    assert held.nbytes == MIB


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="'meta'"):
        peak_bytes(lambda: None, "meta")
