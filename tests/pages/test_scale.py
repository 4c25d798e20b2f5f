"""Axes of bytes."""

import pytest

from compile_remat.pages.scale import MOST_TICKS, byte_scale

MIB = 1 << 20


def test_ticks_are_round_amounts_of_one_unit() -> None:
    scale = byte_scale(120 * MIB)
    assert [name for _, name in scale.ticks] == ["0", "50 MiB", "100 MiB"]
    assert scale.share(scale.top_bytes) == 1 and scale.top_bytes > 120 * MIB


@pytest.mark.parametrize("most", [0, 1, 900, 1023, 70_000, 3 << 20, 1000 << 20, 77 << 30, 5 << 40])
def test_every_size_has_an_axis(most: int) -> None:
    scale = byte_scale(most)
    assert scale.top_bytes > most and 1 <= len(scale.ticks) <= MOST_TICKS
    assert scale.ticks[-1][0] <= scale.top_bytes
