"""One axis of bytes: its end, and the round amounts that label it."""

from __future__ import annotations

from dataclasses import dataclass

from compile_remat._util.units import GIB, KIB, MIB, TIB

HEADROOM = 1.12
"""End of the axis as a multiple of the highest amount, which leaves space for its label."""

MOST_TICKS = 6


@dataclass(frozen=True)
class ByteScale:
    """An axis from 0 to `top_bytes`.

    Attributes:
        ticks: Amounts in bytes with their texts; the first amount is 0.
    """

    top_bytes: int
    ticks: tuple[tuple[int, str], ...]

    def share(self, nbytes: float) -> float:
        """Returns the position of an amount on the axis, from 0 to 1."""
        return nbytes / self.top_bytes


def byte_scale(most_bytes: int) -> ByteScale:
    """Returns the axis for amounts up to `most_bytes`; its at most six ticks are multiples of 1, 2 or 5 times a power of 10."""
    top_bytes = max(most_bytes + 1, int(most_bytes * HEADROOM))
    scale, unit = next(
        ((s, u) for s, u in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if top_bytes >= s), (1, "B")
    )
    steps = (factor * 10**power for power in range(5) for factor in (1, 2, 5))
    step = next(s for s in steps if top_bytes / (s * scale) < MOST_TICKS)
    return ByteScale(
        top_bytes,
        tuple((k * step * scale, f"{k * step} {unit}" if k else "0") for k in range(top_bytes // (step * scale) + 1)),
    )
