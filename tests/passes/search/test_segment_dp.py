"""The fastest row of segments against all rows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from compile_remat.passes.search.segment_dp import Option, SegmentTable, fastest_path

Options = dict[tuple[int, int, int], Option]
LAST = 6


def drawn_options(seed: int) -> Options:
    draw = random.Random(seed)
    keys = [(a, b, level) for a in range(LAST) for b in range(a + 1, LAST + 1) for level in range(2)]
    return {
        key: Option(*key, draw.randint(0, 6), draw.randint(0, 9), draw.randint(0, 8))
        for key in keys
        if draw.random() < 0.6
    }


def all_rows(options: Options, begin: int = 0) -> Iterator[tuple[Option, ...]]:
    if begin == LAST:
        yield ()
    for option in options.values():
        if option.first == begin:
            yield from ((option, *rest) for rest in all_rows(options, option.last))


def peak_of(row: tuple[Option, ...] | list[Option]) -> int:
    return max(sum(o.charge_bytes for o in row[:k]) + option.local_peak_bytes for k, option in enumerate(row))


@pytest.mark.parametrize("seed", range(30))
def test_no_row_that_fits_is_faster(seed: int) -> None:
    options = drawn_options(seed)
    every = [(peak_of(row), sum(o.time_ns for o in row)) for row in all_rows(options)]
    for budget_bytes in range(0, 40, 3):
        fitting = [time_ns for peak, time_ns in every if peak <= budget_bytes]
        found = fastest_path(SegmentTable(options.values()), LAST, budget_bytes)
        assert (found is None) is (not fitting)
        if found is not None:
            assert [o.first for o in found] + [LAST] == [0] + [o.last for o in found]
            assert peak_of(found) <= budget_bytes
            assert sum(o.time_ns for o in found) == min(fitting)


def test_thinned_labels_still_fit() -> None:
    for seed in range(10):
        found = fastest_path(SegmentTable(drawn_options(seed).values()), LAST, 12, max_labels=3)
        assert found is None or peak_of(found) <= 12
