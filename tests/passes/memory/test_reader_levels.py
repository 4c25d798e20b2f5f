"""Rows of values taken level by level are those of a walk from the last value to the first."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from compile_remat.passes.memory.reader_levels import WIDE_BATCH, in_levels

Walk = list[tuple[int, list[int]]]


def random_walk(random: np.random.Generator, num_values: int) -> Walk:
    """Values from the last, each with up to three readers behind it, of which some are in no walk themselves."""
    walk: Walk = []
    for v in range(num_values - 1, -1, -1):
        behind = np.arange(v + 1, num_values)
        readers = random.choice(behind, size=min(len(behind), random.integers(4)), replace=False).tolist()
        if readers or random.random() < 0.5:
            walk.append((v, readers))
    return walk


def one_by_one(walk: Walk, rows: NDArray[np.int32], handed: NDArray[np.int32]) -> None:
    for v, readers in walk:
        for w in readers:
            rows[v] = np.maximum(rows[v], handed[w])
        handed[v] = rows[v] + v


@pytest.mark.parametrize("plans", [1, 7, WIDE_BATCH, WIDE_BATCH + 1])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_a_walk_over_single_values(plans: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    walk = random_walk(random, 40)
    rows, handed = (random.integers(0, 1000, size=(40, plans), dtype=np.int32) for _ in range(2))
    expected_rows, expected_handed = rows.copy(), handed.copy()
    one_by_one(walk, expected_rows, expected_handed)
    for level in in_levels(walk):
        level.raise_rows(rows, handed)
        handed[level.values] = rows[level.values] + level.values[:, None]
    assert np.array_equal(rows, expected_rows)
    assert np.array_equal(handed, expected_handed)


def test_a_value_stands_in_a_later_level_than_its_readers() -> None:
    levels = in_levels([(4, []), (3, [4, 7]), (2, [3]), (1, [4]), (0, [])])
    assert [level.values.tolist() for level in levels] == [[4, 0], [3, 1], [2]]
    assert [level.reading.tolist() for level in levels] == [[], [3, 1], [2]]
    assert levels[1].readers.tolist() == [4, 7, 4] and levels[1].firsts.tolist() == [0, 2]


def test_nothing_to_walk_over() -> None:
    assert in_levels([]) == []
