"""The link between a device and its host, as planning sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Two copy engines, one for each direction, and the host's memory.

    Attributes:
        out_bytes_per_s, back_bytes_per_s: Bandwidth from the device to the host, and back.
        host_bytes: The most bytes that may wait on the host at once.
    """

    out_bytes_per_s: int
    back_bytes_per_s: int
    host_bytes: int

    def out_ns(self, nbytes: int) -> int:
        """Time of a copy to the host."""
        return -(-nbytes * 1_000_000_000 // self.out_bytes_per_s)

    def back_ns(self, nbytes: int) -> int:
        """Time of a copy from the host."""
        return -(-nbytes * 1_000_000_000 // self.back_bytes_per_s)
