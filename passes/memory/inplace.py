"""Which kernel writes over which buffer, in many plans at once.

A kernel takes the first of its sources that it is the last to read.  No two kernels are the last, so kernels do not stand in each
other's way, and all of them look at their first source together, then at their second one, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.buffers import Bools, Ints


@dataclass(frozen=True)
class _Turn:
    """The k-th sources of all kernels that have so many.

    Attributes:
        kernels: Which kernels, by their number, [T].
        sources: Their sources, ascending, [T].
        firsts: Where in `sources` another one begins.
    """

    kernels: Ints
    sources: Ints
    firsts: Ints


class Overwriting:
    """Kernels with the buffers that each may write over, in the order in which it looks at them.

    Attributes:
        kernels: The index of each kernel, [K].
    """

    def __init__(self, pairs: Sequence[tuple[int, Sequence[int]]]) -> None:
        self.kernels = np.array([w for w, _ in pairs], dtype=np.int64)
        self._turns = []
        asking: list[list[tuple[int, int]]] = [
            [] for _ in range(max((len(sources) for _, sources in pairs), default=0))
        ]
        for number, (_, sources) in enumerate(pairs):
            for k, source in enumerate(sources):
                asking[k].append((source, number))
        for together in asking:
            sources, kernels = np.array(sorted(together), dtype=np.int64).T
            firsts = np.flatnonzero(np.diff(sources, prepend=-1))
            self._turns.append(_Turn(kernels, sources, firsts))

    def mark(self, taken: Bools, free: Bools, at: NDArray[np.integer], may: Bools, ends: NDArray[np.integer]) -> None:
        """Set `taken`, [values, P], where a kernel writes over a value's buffer.

        Args:
            free: Whether each kernel writes a buffer at all, [K, P]; not kept.
            at: The slot or place of each kernel, [K, P] or [K, 1].
            may: Whether each value has a buffer that can be written over, [values, P].
            ends: The last slot or place at which it is read, [values, P].
        """
        for turn in self._turns:
            hit = free[turn.kernels]
            hit &= may[turn.sources]
            hit &= ends[turn.sources] == at[turn.kernels]
            if not hit.any():
                continue
            free[turn.kernels] &= ~hit
            taken[turn.sources[turn.firsts]] |= np.logical_or.reduceat(hit, turn.firsts, axis=0)
