"""The plans tried so far that no other plan beats in both peak and time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.simulator import Batch, Bools, Ints


class ParetoArchive:
    """The best of many plans, sorted from the lowest peak to the shortest time."""

    def __init__(self) -> None:
        self.peaks: Ints = np.zeros(0, dtype=np.int64)
        self.times: Ints = np.zeros(0, dtype=np.int64)
        self._masks: list[NDArray[np.uint8]] = []  # eight values to a byte

    def add(self, batch: Batch, saved: Bools) -> None:
        """Adds the plans of a batch that no known plan beats; `saved` holds the batch's masks, [values, P]."""
        known = len(self._masks)
        peaks = np.concatenate([self.peaks, batch.peak])
        times = np.concatenate([self.times, batch.time_ns])
        order = np.lexsort((times, peaks))  # stable: of equal plans, the one known first stays
        fastest = np.minimum.accumulate(times[order])
        kept = order[np.concatenate([[True], fastest[1:] < fastest[:-1]])] if len(order) else order
        self.peaks, self.times = peaks[kept], times[kept]
        self._masks = [self._masks[k] if k < known else np.packbits(saved[:, k - known]) for k in kept.tolist()]
        self._num_values = saved.shape[0]

    def within(self, budget_bytes: int) -> Bools | None:
        """Mask of the fastest plan within the budget; None if there is none."""
        return self._mask(int(np.searchsorted(self.peaks, budget_bytes, side="right")) - 1)

    def above(self, budget_bytes: int) -> Bools | None:
        """Mask of the plan of lowest peak above the budget; None if there is none."""
        return self._mask(int(np.searchsorted(self.peaks, budget_bytes, side="right")))

    def _mask(self, k: int) -> Bools | None:
        if not 0 <= k < len(self._masks):
            return None
        return np.unpackbits(self._masks[k], count=self._num_values).astype(bool)
