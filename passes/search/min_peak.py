"""Plans of lowest peak among those that compute no value twice in the backward.

Bisection over what the spans can meet, then the best is pressed down: polished for a part of its own peak, again and again.  Each
further way to go lower is tried only where the one before it got lower; the dear ones seldom do.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from compile_remat.passes.memory.simulator import Bools
from compile_remat.passes.search import perturbation
from compile_remat.passes.search.strategy import POLISH_ROUNDS, Search

BISECTIONS = 7
"""Budgets tried to find the lowest that the spans can meet."""

PRESS_SHARES = (0.8, 0.93, 0.97)
"""A plan is pressed down by aiming at these parts of its peak, one after the other."""

PRESS_ROUNDS = 6
PRESS_WEIGHT = 10.0

SEARCH_SHARES = (0.3, 0.9)
"""The search within a budget looks for the floor at these parts of the lowest peak so far."""

SAME_PEAK = 0.998
"""Of plans whose peaks differ by less than this factor the fastest is called the lowest."""


class Floors:
    """The floor of one problem."""

    def __init__(self, search: Search) -> None:
        self.search = search

    @cached_property
    def pressed(self) -> Bools:
        """A plan of low peak, quickly found."""
        with self.search.effort.search():
            best = self._spaced()
            for share in PRESS_SHARES:
                lower = self._press(best, share)
                if lower is best:
                    break
                best = lower
            return best

    @cached_property
    def found(self) -> list[Bools]:
        """Plans of low peak; the one to be called the lowest stands first."""
        search, pressed = self.search, self.pressed
        with search.effort.search():
            best = perturbation.lower(search.polisher, pressed, POLISH_ROUNDS, PRESS_WEIGHT)
            floors = [best]
            if search.peak(best) < search.peak(pressed) * SAME_PEAK:
                for share in SEARCH_SHARES:
                    if search.effort.is_spent:
                        break
                    floors.append(min(search.candidates(int(search.peak(best) * share)), key=search.peak))
                    best = min(floors, key=search.peak)
        near = search.peak(best) / SAME_PEAK
        return sorted(floors, key=lambda m: (search.peak(m) > near, search.time(m)))

    @cached_property
    def unavoidable_bytes(self) -> int:
        """Live at the end of every backward: gradients and outputs."""
        simulator = self.search.simulator
        kept = simulator.step_last >= simulator.num_steps
        return simulator.output_bytes + int(simulator.step_bytes[kept].sum())

    def _spaced(self) -> Bools:
        search = self.search
        peaks = search.simulator.run(np.stack(search.levels, axis=1)).peak
        starts = [search.levels[int(np.argmin(peaks))]]
        low, high = self.unavoidable_bytes, int(peaks.min())
        for _ in range(BISECTIONS):
            if search.effort.is_spent:
                break
            target = (low + high) // 2
            spaced = search.spaced(target)
            peak = None if spaced is None else search.peak(spaced)
            if spaced is not None:
                starts.append(spaced)
            if peak is not None and peak <= target:
                high = peak
            else:
                low = target
        starts = sorted(starts, key=search.peak)[:2]
        pressed = [search.polish(m, int(0.9 * search.peak(m)), rounds=1, weight_factor=PRESS_WEIGHT) for m in starts]
        return min([*pressed, *starts], key=search.peak)

    def _press(self, mask: Bools, share: float) -> Bools:
        """Aim below the plan's peak; the plan itself where that does not lower it."""
        target = int(self.search.peak(mask) * share)
        pressed = self.search.polish(mask, target, rounds=PRESS_ROUNDS, weight_factor=PRESS_WEIGHT)
        return min(mask, pressed, key=self.search.peak)
