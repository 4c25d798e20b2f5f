"""Host memory that outlives a step: pinned by torch for CUDA, mapped outside of torch's allocator for the CPU.

Torch's caching allocator of pinned memory keeps blocks for the next step, and hands a block on only once the copies that read or
write it have ended.  It rounds a block up to a power of two, and the setting `host_memory` counts it so.  Mapped blocks are kept by
size here, as the kernel would clear each new page.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque

import numpy as np
import torch


class MappedBlocks:
    """Mapped memory by size.

    Blocks come back in whichever thread drops the last tensor, also in the middle of another call: no lock is taken, and each
    change is a single operation of a dictionary or a queue.

    Attributes:
        peak_bytes: The most `live_bytes` since `reset_peak`.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._live: dict[int, int] = {}
        self._free: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)

    @property
    def live_bytes(self) -> int:
        """Bytes of the blocks that tensors hold now."""
        return sum(list(self._live.values()))

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks that wait for the next tensor of their size."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def take(self, nbytes: int) -> torch.Tensor:
        """Bytes that return here when the last tensor over them has died; raises OSError if the system has no more memory."""
        try:
            block = self._free[nbytes].pop()
        except IndexError:
            block = mmap.mmap(-1, nbytes)
        array = np.frombuffer(block, dtype=np.uint8)
        weakref.finalize(array, self._put, block).atexit = False
        self._live[id(block)] = nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return torch.from_numpy(array)

    def reset_peak(self) -> None:
        """Let `peak_bytes` start from the bytes that are live now."""
        self.peak_bytes = self.live_bytes

    def drop_free(self) -> None:
        """Return all blocks that no tensor holds to the system."""
        for blocks in list(self._free.values()):
            blocks.clear()

    def _put(self, block: mmap.mmap) -> None:
        del self._live[id(block)]
        self._free[len(block)].append(block)


MAPPED = MappedBlocks()


def span_of(tensor: torch.Tensor) -> int:
    """Number of elements from the first to the last of a tensor in memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return 1 + last if tensor.numel() else 0


def empty_mapped(like: torch.Tensor) -> torch.Tensor:
    """Memory outside of torch's allocator with the layout of a tensor; raises OSError if there is none."""
    nbytes = max(1, span_of(like)) * like.dtype.itemsize
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return MAPPED.take(size).view(like.dtype).as_strided(like.size(), like.stride())


def empty_pinned(like: torch.Tensor) -> torch.Tensor:
    """Pinned memory with the layout of a tensor; raises RuntimeError if there is none."""
    return torch.empty(span_of(like), dtype=like.dtype, pin_memory=True).as_strided(like.size(), like.stride())
