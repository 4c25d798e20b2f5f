"""The link between a device and its host, as planning sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Two copy engines, one for each direction, and the host's memory.

    Attributes:
        out_bytes_per_s, back_bytes_per_s: Bandwidth from the device to the host, and back.
        host_bytes: The most bytes of host memory that may be taken at once.
        slowed_part: Part of a copy's time by which kernels beside it take longer.
        rounds_up: True if the host's allocator rounds each buffer up to a power of two, as torch's does for pinned memory.
    """

    out_bytes_per_s: int
    back_bytes_per_s: int
    host_bytes: int
    slowed_part: float = 0.01
    rounds_up: bool = False

    def held_bytes(self, nbytes: int) -> int:
        """Bytes of host memory that a buffer takes."""
        return 1 << (nbytes - 1).bit_length() if self.rounds_up and nbytes else nbytes

    def out_ns(self, nbytes: int) -> int:
        """Time of a copy to the host."""
        return -(-nbytes * 1_000_000_000 // self.out_bytes_per_s)

    def back_ns(self, nbytes: int) -> int:
        """Time of a copy from the host."""
        return -(-nbytes * 1_000_000_000 // self.back_bytes_per_s)
