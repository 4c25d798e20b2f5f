"""Kernels that write over buffers, all at once, against one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from compile_remat.passes.memory.inplace import Overwriting

PLANS, VALUES, LAST = 5, 9, 12


def one_by_one(
    pairs: list[tuple[int, list[int]]], free: np.ndarray, at: np.ndarray, may: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    taken = np.zeros(ends.shape, dtype=bool)
    for number, (_, sources) in enumerate(pairs):
        for plan in range(ends.shape[1]):
            for v in sources if free[number, plan] else ():
                if may[v, plan] and ends[v, plan] == at[number, plan]:
                    taken[v, plan] = True
                    break
    return taken


@pytest.mark.parametrize("seed", range(40))
def test_equals_one_kernel_after_the_other(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(0, 8))
    at = np.stack([random.permutation(LAST)[:count] for _ in range(PLANS)], axis=1).reshape(count, PLANS)
    pairs = [(k, random.choice(VALUES, random.integers(1, 5), replace=False).tolist()) for k in range(count)]
    free, may = random.random((count, PLANS)) < 0.8, random.random((VALUES, PLANS)) < 0.8
    ends = random.integers(0, LAST, (VALUES, PLANS))
    found = np.zeros(ends.shape, dtype=bool)
    Overwriting(pairs).mark(found, free.copy(), at, may, ends)
    assert (found == one_by_one(pairs, free, at, may, ends)).all()


def test_the_first_source_that_ends_there_is_taken() -> None:
    taken = np.zeros((3, 1), dtype=bool)
    ends, every = np.array([[4], [5], [5]]), np.ones((3, 1), dtype=bool)
    Overwriting([(5, [0, 2, 1])]).mark(taken, np.ones((1, 1), dtype=bool), np.array([[5]]), every, ends)
    assert taken[:, 0].tolist() == [False, False, True]
