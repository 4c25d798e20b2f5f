"""Replay of allocations and frees under the rules of torch's CUDA allocator, to find the memory that it reserves.

The rules are those of torch's manual (notes/cuda.html, "Memory management") and of ``c10/cuda/CUDACachingAllocator.cpp``:

* a request is rounded up to blocks of 512 bytes;
* requests of at most 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments of 20 MiB; larger requests have a
  segment of their own, rounded up to 2 MiB.  Small and large requests use different segments;
* a request takes the smallest free block that is large enough, and of equal blocks the one at the lowest address.  The rest of the
  block is split off if it is at least 512 bytes (small requests) or more than 1 MiB (large ones); else the request keeps it;
* a freed block is merged with its free neighbours of the same segment; segments stay with the process;
* with ``expandable_segments:True`` there is one segment for small and one for large requests, which grow by pages of 2 or 20 MiB;
  large requests, too, split off a rest of at least 512 bytes.

The replay has one stream and no ``max_split_size_mb``, ``roundup_power2_divisions`` or CUDA graphs (which have their own pools).
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from compile_remat._torch.sizes import CUDA_BLOCK_BYTES

MIB = 1 << 20
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""Requests of at least this size have a segment of their own, rounded up to `SMALL_SEGMENT_BYTES`."""

Event = tuple[Hashable, int]
"""Any key of a tensor's storage, and the bytes that are allocated for it; 0 bytes free it."""


@dataclass(frozen=True)
class Reservation:
    """Peak memory of a sequence of events, in bytes.

    Attributes:
        allocated_peak_bytes: The most bytes of blocks in use, as ``torch.cuda.max_memory_allocated`` counts.
        reserved_peak_bytes: Bytes of all segments at the end, as ``torch.cuda.max_memory_reserved`` counts: none is released.
        required_peak_bytes: The most bytes of segments with a block in use (of pages, if segments expand).  Torch releases the
            other segments before an allocation fails.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    required_peak_bytes: int


def reservation_of(
    events: Iterable[Event], *, steps: int = 1, expandable: bool = False, held: Iterable[int] = ()
) -> Reservation:
    """The memory that an allocator reserves for `events`, repeated `steps` times; after each step all their tensors are freed.

    Args:
        events: Allocations and frees of one step.
        steps: Number of steps.
        expandable: True for ``expandable_segments:True``.
        held: Bytes of each tensor that is in use all the time, such as a parameter.  The figures count only the bytes that the
            events add; the events may use free blocks in the segments of these tensors.
    """
    allocator = CachingAllocator(expandable)
    for k, nbytes in enumerate(held):
        allocator.allocate((_HELD, k), nbytes)
    before = Reservation(allocator.allocated_bytes, allocator.reserved_bytes, allocator.required_peak_bytes)
    events, held_keys = list(events), set(allocator.in_use)
    for _ in range(steps):
        for key, nbytes in events:
            if nbytes:
                allocator.allocate(key, nbytes)
            else:
                allocator.free(key)
        for key in allocator.in_use.keys() - held_keys:
            allocator.free(key)
    return Reservation(
        allocator.allocated_peak_bytes - before.allocated_peak_bytes,
        allocator.reserved_bytes - before.reserved_peak_bytes,
        allocator.required_peak_bytes - before.required_peak_bytes,
    )


_HELD = object()
"""Part of the keys of tensors that are in use all the time."""


def counted_bytes(nbytes: int, *, expandable: bool = False) -> int:
    """Bytes that ``max_memory_allocated`` counts for a buffer: whole blocks of 512 bytes, and the rest of its own segment if any.

    A rest of more than 1 MiB is split off and not counted.  Smaller requests share segments, so their rest depends on what was
    freed before and is not counted.
    """
    size = round_up(nbytes, CUDA_BLOCK_BYTES)
    if expandable or size < OWN_SEGMENT_BYTES:
        return size
    segment = round_up(size, SMALL_SEGMENT_BYTES)
    return segment if segment - size <= SMALL_BYTES else size


@dataclass(eq=False)
class _Block:
    """A part of a segment: bytes at an address, linked with the blocks before and after it."""

    pool: _Pool
    address: int
    nbytes: int
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class _Pool:
    """The segments of small or of large requests, with their free blocks sorted by size and address.

    Attributes:
        last: The last block of an expandable segment.
        unused_bytes: Bytes of segments, or of pages of an expandable segment, with no block in use.
    """

    def __init__(self, least_rest: int, page: int | None) -> None:
        self.least_rest, self.page = least_rest, page
        self.unused_bytes = 0
        self.keys: list[tuple[int, int]] = []
        self.free_blocks: dict[int, _Block] = {}
        self.last: _Block | None = None
        self.end = 0

    def add(self, block: _Block) -> None:
        bisect.insort(self.keys, (block.nbytes, block.address))
        self.free_blocks[block.address] = block
        self.unused_bytes += self._unused_in(block)

    def remove(self, block: _Block) -> None:
        del self.keys[bisect.bisect_left(self.keys, (block.nbytes, block.address))]
        del self.free_blocks[block.address]
        self.unused_bytes -= self._unused_in(block)

    def _unused_in(self, block: _Block) -> int:
        if self.page is None:
            return block.nbytes if block.before is None and block.after is None else 0
        end = block.address + block.nbytes
        return max(0, end // self.page * self.page - round_up(block.address, self.page))

    def best_fit(self, nbytes: int) -> _Block | None:
        at = bisect.bisect_left(self.keys, (nbytes, 0))
        return self.free_blocks[self.keys[at][1]] if at < len(self.keys) else None

    def give_back(self, block: _Block) -> None:
        """Mark a block as free and merge it with its free neighbours."""
        block.is_free = True
        if block.before is not None and block.before.is_free:
            self.remove(block.before)
            block = self._joined(block.before, block)
        if block.after is not None and block.after.is_free:
            self.remove(block.after)
            block = self._joined(block, block.after)
        self.add(block)

    def _joined(self, first: _Block, second: _Block) -> _Block:
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        if self.last is second:
            self.last = first
        return first

    def cut(self, block: _Block, size: int) -> None:
        """Split off the bytes of a block after the first `size`, unless they are fewer than `least_rest`."""
        rest = block.nbytes - size
        if rest < self.least_rest:
            return
        tail = _Block(self, block.address + size, rest, before=block, after=block.after)
        block.nbytes, block.after = size, tail
        if tail.after is not None:
            tail.after.before = tail
        if self.last is block:
            self.last = tail
        self.add(tail)

    def grow(self, nbytes: int, before: _Block | None) -> None:
        """Add `nbytes` of new memory, after `before` in the same segment, or as a new segment if `before` is None."""
        block = _Block(self, self.end, nbytes, before=before)
        self.end += nbytes
        if before is not None:
            before.after = block
        self.last = block
        self.give_back(block)


class CachingAllocator:
    """A device's memory under the rules above.

    Attributes:
        in_use: The blocks in use, by the keys of their requests.
        allocated_bytes: Bytes of the blocks in use.
        reserved_bytes: Bytes of all segments.
        required_peak_bytes: See `Reservation`.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.in_use: dict[Hashable, _Block] = {}
        self.allocated_bytes = self.allocated_peak_bytes = self.reserved_bytes = 0
        self.required_peak_bytes = 0
        if expandable:
            self._small, self._large = (
                _Pool(CUDA_BLOCK_BYTES, SMALL_SEGMENT_BYTES),
                _Pool(CUDA_BLOCK_BYTES, LARGE_SEGMENT_BYTES),
            )
        else:
            self._small, self._large = _Pool(CUDA_BLOCK_BYTES, None), _Pool(SMALL_BYTES + 1, None)

    def allocate(self, key: Hashable, nbytes: int) -> None:
        """Take a block for `nbytes` bytes; ValueError if `key` has a block already."""
        if key in self.in_use:
            raise ValueError(f"{key!r} has a block already")
        size = round_up(nbytes, CUDA_BLOCK_BYTES)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.best_fit(size)
        if block is None:
            self._reserve(pool, size)
            block = pool.best_fit(size)
            assert block is not None
        pool.remove(block)
        pool.cut(block, size)
        block.is_free = False
        self.in_use[key] = block
        self.allocated_bytes += block.nbytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        required_bytes = self.reserved_bytes - self._small.unused_bytes - self._large.unused_bytes
        self.required_peak_bytes = max(self.required_peak_bytes, required_bytes)

    def free(self, key: Hashable) -> None:
        """Free the block of `key`; KeyError if it has none."""
        block = self.in_use.pop(key)
        self.allocated_bytes -= block.nbytes
        block.pool.give_back(block)

    def _reserve(self, pool: _Pool, size: int) -> None:
        """Reserve a new segment, or pages of the expandable one, for a request of `size` bytes."""
        page = SMALL_SEGMENT_BYTES if pool is self._small else LARGE_SEGMENT_BYTES
        last = pool.last if self.expandable else None
        if self.expandable:
            granted = round_up(size - (last.nbytes if last is not None and last.is_free else 0), page)
        else:
            granted = page if size < OWN_SEGMENT_BYTES else round_up(size, SMALL_SEGMENT_BYTES)
        self.reserved_bytes += granted
        pool.grow(granted, last)


def round_up(nbytes: int, unit: int) -> int:
    """The least multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit
