"""In-place reuse: the kernels that overwrite the buffers of their inputs, in many plans at once.

A kernel reuses the first of its sources that no other kernel reads later.  A buffer has one last reader, so kernels never compete
for a buffer: all kernels test their first source together, then their second source, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.buffers import Bools, Ints


@dataclass(frozen=True)
class _Turn:
    """The k-th sources of all kernels with at least k sources.

    Attributes:
        kernels: Position of each kernel in `Overwriting.kernels`, [T].
        sources: Index of each kernel's k-th source, ascending, [T].
        firsts: Positions in `sources` at which another source begins.
    """

    kernels: Ints
    sources: Ints
    firsts: Ints


class Overwriting:
    """Kernels, each with the buffers that the kernel may reuse in place, in order of preference.

    Attributes:
        kernels: Index of each kernel's value or step, [K].
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
        """Sets `taken`, [values, P], to True where a kernel reuses a value's buffer in place.

        Args:
            free: True where a kernel writes a buffer at all, [K, P]; overwritten by this method.
            at: The slot or place of each kernel, [K, P] or [K, 1].
            may: True where a value has a buffer that a kernel can reuse, [values, P].
            ends: The last slot or place at which each value is read, [values, P].
        """
        for turn in self._turns:
            hit = free[turn.kernels]
            hit &= may[turn.sources]
            hit &= ends[turn.sources] == at[turn.kernels]
            if not hit.any():
                continue
            free[turn.kernels] &= ~hit
            taken[turn.sources[turn.firsts]] |= np.logical_or.reduceat(hit, turn.firsts, axis=0)
