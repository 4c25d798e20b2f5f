"""Rows that follow from the rows of a value's readers, for many values at once.

A walk from the last value to the first costs some calls of numpy for each value, which is much of the time of a small batch of
plans.  Values that do not read each other are walked over together here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.buffers import Ints

WIDE_BATCH = 192
"""Of batches with more plans than that each value is taken by itself: there `reduceat` takes longer than single rows."""


@dataclass(frozen=True)
class ReaderLevel:
    """Values none of which reads another one of them.

    Attributes:
        values: All of them, in the order of the walk.
        reading: Those that have readers in the walk.
        readers: The readers of the first of `reading`, then those of the next, and so on.
        firsts: Where in `readers` those of each begin.
    """

    values: Ints
    reading: Ints
    readers: Ints
    firsts: Ints

    def raise_rows(self, rows: NDArray[np.int32], of_readers: NDArray[np.int32]) -> None:
        """Raise the rows of values, [values, P], to the largest of what their readers hand them, [values, P]; in place."""
        if not len(self.reading):
            return
        if rows.shape[1] <= WIDE_BATCH:
            largest = np.maximum.reduceat(of_readers[self.readers], self.firsts, axis=0)
            rows[self.reading] = np.maximum(rows[self.reading], largest)
            return
        for v, readers in zip(self.reading.tolist(), np.split(self.readers, self.firsts[1:]), strict=True):
            row = rows[v]
            for w in readers.tolist():
                np.maximum(row, of_readers[w], out=row)


def in_levels(walk: Sequence[tuple[int, Sequence[int]]]) -> list[ReaderLevel]:
    """Values with their readers, each behind its readers, as levels: a value's readers are in earlier ones or in none."""
    levels: list[list[tuple[int, Sequence[int]]]] = []
    level_of: dict[int, int] = {}
    for v, readers in walk:
        level_of[v] = 1 + max((level_of[w] for w in readers if w in level_of), default=-1)
        if level_of[v] == len(levels):
            levels.append([])
        levels[level_of[v]].append((v, readers))
    return [_level(found) for found in levels]


def _level(found: Sequence[tuple[int, Sequence[int]]]) -> ReaderLevel:
    reading = [(v, readers) for v, readers in found if readers]
    flat = [w for _, readers in reading for w in readers]
    numbers = [0, *np.cumsum([len(readers) for _, readers in reading]).tolist()][:-1] if reading else []
    return ReaderLevel(
        *(np.array(x, dtype=np.int64) for x in ([v for v, _ in found], [v for v, _ in reading], flat, numbers))
    )
