"""Computes the row of a value from the rows of its readers, for many values at once.

A walk from the last value to the first costs some numpy calls for each value, which is much of the time of a small batch of plans.
So values that do not read each other form a level, and one call computes the rows of a whole level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.buffers import Ints

WIDE_BATCH = 192
"""Most plans in a batch for which a level is computed at once: in wider batches, `reduceat` takes longer than single rows."""


@dataclass(frozen=True)
class ReaderLevel:
    """Values none of which reads another value of the level.

    Attributes:
        values: Indices of the values, in the order of the walk.
        reading: Indices of the values that have readers in the walk.
        readers: Indices of the readers of the first value in `reading`, then of the next value's readers, and so on.
        firsts: Position in `readers` at which the readers of each value begin.
        each: The values of `reading`, each with its readers.
    """

    values: Ints
    reading: Ints
    readers: Ints
    firsts: Ints
    each: Sequence[tuple[int, Sequence[int]]]

    def raise_rows(self, rows: NDArray[np.int32], of_readers: NDArray[np.int32]) -> None:
        """Raises each value's row in `rows`, [values, P], to the largest row of its readers in `of_readers`, [values, P]."""
        if not len(self.reading):
            return
        if rows.shape[1] <= WIDE_BATCH:
            largest = np.maximum.reduceat(of_readers[self.readers], self.firsts, axis=0)
            rows[self.reading] = np.maximum(rows[self.reading], largest)
            return
        for v, readers in self.each:
            row = rows[v]
            for w in readers:
                np.maximum(row, of_readers[w], out=row)


def in_levels(walk: Sequence[tuple[int, Sequence[int]]]) -> list[ReaderLevel]:
    """Sorts (value, readers) entries, readers first, into levels: a value's readers are in earlier levels or in none."""
    levels: list[list[tuple[int, Sequence[int]]]] = []
    level_of: dict[int, int] = {}
    for v, readers in walk:
        level_of[v] = 1 + max((level_of[w] for w in readers if w in level_of), default=-1)
        if level_of[v] == len(levels):
            levels.append([])
        levels[level_of[v]].append((v, readers))
    return [_level(found) for found in levels]


def _level(found: Sequence[tuple[int, Sequence[int]]]) -> ReaderLevel:
    reading = [(v, read_by) for v, read_by in found if read_by]
    flat = [w for _, read_by in reading for w in read_by]
    numbers = [0, *np.cumsum([len(read_by) for _, read_by in reading]).tolist()][:-1] if reading else []
    columns = ([v for v, _ in found], [v for v, _ in reading], flat, numbers)
    values, own, readers, firsts = (np.array(column, dtype=np.int64) for column in columns)
    return ReaderLevel(values, own, readers, firsts, reading)
