"""The rules of torch's CUDA allocator, on runs that can be followed by hand; no GPU is needed."""

from __future__ import annotations

import itertools
import random

import pytest

from compile_remat._torch.sizes import CUDA_BLOCK_BYTES
from compile_remat.cost_models.device.caching_allocator import (
    CachingAllocator,
    Event,
    counted_bytes,
    reservation_of,
)

MIB = 1 << 20


def allocated(*sizes: int, expandable: bool = False) -> CachingAllocator:
    """An allocator with blocks 0, 1, 2, ... of these sizes in use."""
    allocator = CachingAllocator(expandable)
    for key, nbytes in enumerate(sizes):
        allocator.allocate(key, nbytes)
    return allocator


@pytest.mark.parametrize(
    ("nbytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (8_519_680, 8_519_680, 20 * MIB),  # cuBLAS's workspace before Hopper, as torch.cuda.memory_snapshot() shows it
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is too little to be cut off
        (100 * MIB + 1, 100 * MIB + CUDA_BLOCK_BYTES, 102 * MIB),  # a rest of nearly 2 MiB is cut off
    ],
)
def test_one_request(nbytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
    allocator = allocated(nbytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated_bytes, reserved_bytes)


@pytest.mark.parametrize("nbytes", [1, 513, MIB, MIB + 1, 8_519_680, 10 * MIB, 11 * MIB, 43 * MIB, 100 * MIB + 1])
@pytest.mark.parametrize("expandable", [False, True])
def test_what_one_buffer_counts_is_what_an_empty_allocator_says(nbytes: int, expandable: bool) -> None:
    allocator = CachingAllocator(expandable)
    allocator.allocate("x", nbytes)
    assert counted_bytes(nbytes, expandable=expandable) == allocator.allocated_bytes


def test_steps_use_what_is_free_in_the_segments_of_what_is_held() -> None:
    """A parameter of 5 MiB leaves 15 of its segment free: a buffer of 14.5 takes all of that, as the rest is below 1 MiB."""
    events: list[Event] = [("a", 9 * MIB), ("b", 5 * MIB + 512), ("a", 0)]
    alone, beside = reservation_of(events), reservation_of(events, steps=2, held=[5 * MIB])
    assert (alone.allocated_peak_bytes, alone.reserved_peak_bytes) == (14 * MIB + 512, 20 * MIB)
    assert (beside.allocated_peak_bytes, beside.reserved_peak_bytes) == (15 * MIB, 0)
    assert beside.required_peak_bytes == 0


def test_small_and_large_requests_use_different_segments() -> None:
    assert allocated(4 * MIB, 512).reserved_bytes == 22 * MIB
    assert allocated(4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB).reserved_bytes == 20 * MIB
    assert allocated(512, MIB, MIB).reserved_bytes == 4 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = allocated(30 * MIB, 40 * MIB, 50 * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.allocate("x", 38 * MIB)
    assert allocator.in_use["x"].nbytes == 38 * MIB  # cut from the segment of 40
    allocator.allocate("y", 45 * MIB)
    allocator.allocate("z", 30 * MIB)
    assert allocator.reserved_bytes == 120 * MIB


def test_a_rest_of_at_most_a_mib_goes_with_a_large_request() -> None:
    allocator = allocated(12 * MIB)
    allocator.free(0)
    allocator.allocate("x", 11 * MIB)
    assert (allocator.allocated_bytes, allocator.allocated_peak_bytes) == (12 * MIB, 12 * MIB)


def test_neighbours_that_are_free_are_joined() -> None:
    allocator = allocated(6 * MIB, 6 * MIB, 6 * MIB)  # of one segment, with 2 MiB left
    for key in (0, 2, 1):
        allocator.free(key)
    allocator.allocate("all", 19 * MIB)
    assert allocator.reserved_bytes == 20 * MIB and allocator.allocated_bytes == 20 * MIB


def test_holes_cost_a_segment_unless_segments_expand() -> None:
    """Four tensors of 30 MiB, every second one freed: 45 MiB find no room in two holes of 30."""

    def reserved_with_holes(expandable: bool) -> int:
        allocator = allocated(*[30 * MIB] * 4, expandable=expandable)
        allocator.free(0)
        allocator.free(3)
        allocator.allocate("x", 45 * MIB)
        return allocator.reserved_bytes

    assert reserved_with_holes(expandable=False) == (120 + 46) * MIB
    assert reserved_with_holes(expandable=True) == 140 * MIB  # the last hole grows by a page of 20


def test_steps_after_the_first_use_its_segments() -> None:
    events: list[Event] = [("a", 30 * MIB), ("b", 30 * MIB), ("a", 0), ("c", 20 * MIB)]
    once, often = reservation_of(events), reservation_of(events, steps=5)
    assert once == often and (once.allocated_peak_bytes, once.reserved_peak_bytes) == (60 * MIB, 60 * MIB)


def test_empty_segments_are_not_required() -> None:
    """One tensor after another, each larger than the one before: each gets a segment, and the last one needs only its own."""
    events: list[Event] = []
    for size in (30, 40, 50):
        events += [(size, size * MIB), (size, 0)]
    found = reservation_of(events)
    assert (found.allocated_peak_bytes, found.reserved_peak_bytes, found.required_peak_bytes) == (
        50 * MIB,
        120 * MIB,
        50 * MIB,
    )
    grown = reservation_of(events, expandable=True)
    assert (grown.reserved_peak_bytes, grown.required_peak_bytes) == (60 * MIB, 60 * MIB)


def test_a_key_has_one_block() -> None:
    with pytest.raises(ValueError, match="'a' has a block already"):
        reservation_of([("a", 1), ("a", 1)])
    with pytest.raises(KeyError):
        reservation_of([("a", 0)])


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap_and_free_ones_are_joined(expandable: bool) -> None:
    rng = random.Random(3)
    allocator = CachingAllocator(expandable)
    for key in range(600):
        if allocator.in_use and rng.random() < 0.45:
            allocator.free(rng.choice(sorted(allocator.in_use, key=str)))
        else:
            allocator.allocate(key, int(2 ** rng.uniform(5, 26)))
    in_use = list(allocator.in_use.values())
    assert allocator.allocated_bytes == sum(block.nbytes for block in in_use)
    for pool in (allocator._small, allocator._large):
        free = list(pool.free_blocks.values())
        assert sorted(pool.keys) == pool.keys == sorted((b.nbytes, b.address) for b in free)
        assert pool.unused_bytes == sum(pool._unused_in(b) for b in free)
        blocks = sorted([*free, *(b for b in in_use if b.pool is pool)], key=lambda b: b.address)
        assert sum(b.nbytes for b in blocks) == pool.end
        for first, second in itertools.pairwise(blocks):
            assert first.address + first.nbytes == second.address
            assert not (first.is_free and second.is_free and first.after is second)
    reserved_bytes = allocator.reserved_bytes
    for key in list(allocator.in_use):
        allocator.free(key)
    assert allocator._small.unused_bytes + allocator._large.unused_bytes == allocator.reserved_bytes
    assert allocator.reserved_bytes == reserved_bytes == allocator._small.end + allocator._large.end
