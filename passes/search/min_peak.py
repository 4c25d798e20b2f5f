"""Plans of lowest peak among those that compute no value twice in the backward.

Bisection finds the lowest budget that the segments' dynamic programme meets.  Local search then lowers the peak of the best
plan: several times, its target is a part of the plan's own peak.  Next, the search tries random neighbours of that plan, and runs
as a whole for a budget that no plan can meet: without this run, a U-Net's plan for a budget had a peak 2 % below the lowest plan.
Once more, swaps reach further: two residual sums have several small values between them.
Last, the search runs for budgets just below the lowest peak so far: a WaveNet's plan for a budget lay below its lowest plan.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from compile_remat.passes.memory.simulator import Bools
from compile_remat.passes.search.moves import perturbation
from compile_remat.passes.search.strategy import Search


class MinimumPeak:
    """Plans of lowest peak of one problem."""

    def __init__(self, search: Search) -> None:
        self.search = search

    @cached_property
    def first(self) -> Bools:
        """A plan of low peak, quickly found."""
        with self.search.work.search():
            best = self._from_segments()
            for share in self.search.options.min_peak_targets:
                lower = self._press(best, share)
                if lower is best:
                    break
                best = lower
            return best

    @cached_property
    def found(self) -> list[Bools]:
        """Plans of low peak; the first is the lowest plan: the fastest one of nearly the lowest peak."""
        search, pressed, options = self.search, self.first, self.search.options
        if search.is_lowest(search.peak(pressed)):
            return [pressed]
        with search.work.search():
            best = pressed
            if options.uses_perturbation:
                best = perturbation.lower(search.searcher, pressed, options.rounds, options.strict_factor)
            minimum_peak = [best]
            if not search.work.is_spent:
                minimum_peak.append(self._searched(best, options.floor_search_target))
                minimum_peak.append(self._swapped_widely(best, options.floor_search_target))
                best = min(minimum_peak, key=search.peak)
                while (lower := self._descended(best)) is not None:
                    minimum_peak.append(lower)
                    best = lower
        near = search.peak(best) / options.same_peak
        return sorted(minimum_peak, key=lambda m: (search.peak(m) > near, search.time(m)))

    @cached_property
    def unavoidable_bytes(self) -> int:
        """Bytes live at the end of every backward: gradients and outputs."""
        simulator = self.search.simulator
        kept = simulator.lifetimes.step_last >= simulator.num_steps
        return simulator.output_bytes + int(simulator.lifetimes.step_bytes[kept].sum())

    def _from_segments(self) -> Bools:
        search = self.search
        peaks = search.simulator.run(np.stack(search.levels, axis=1)).peak
        starts = [search.levels[int(np.argmin(peaks))]]
        low, high = self.unavoidable_bytes, int(peaks.min())
        for _ in range(search.options.min_peak_bisections):
            if search.work.is_spent:
                break
            target = (low + high) // 2
            from_segments = search.from_segments(target)
            peak = None if from_segments is None else search.peak(from_segments)
            if from_segments is not None:
                starts.append(from_segments)
            if peak is not None and peak <= target:
                high = peak
            else:
                low = target
        starts = sorted(starts, key=search.peak)[: search.options.min_peak_starts]
        share, factor = search.options.start_target, search.options.strict_factor
        pressed = [search.improve(m, int(share * search.peak(m)), rounds=1, weight_factor=factor) for m in starts]
        return min([*pressed, *starts], key=search.peak)

    def _searched(self, mask: Bools, share: float) -> Bools:
        """The plan of lowest peak from the whole search for a budget of `share` times the peak of `mask`."""
        search = self.search
        return min(search.candidates(int(share * search.peak(mask))), key=search.peak)

    def _swapped_widely(self, mask: Bools, share: float) -> Bools:
        """A plan for `share` times the peak of `mask`, from the best level, by a local search whose swaps reach further."""
        search, options = self.search, self.search.options
        target, near = int(share * search.peak(mask)), search.searcher
        far, most = (options.far_swaps * each for each in (options.swap_distance, options.max_moves))
        searcher = replace(near, options=replace(options, swap_distance=far, max_moves=most), simulations=0)
        found = searcher.run(search.best_level(target), target, 1 + options.rounds)
        found = searcher.run(found, target, options.rounds, options.strict_factor)
        near.simulations += searcher.simulations
        return found

    def _descended(self, mask: Bools) -> Bools | None:
        """A plan of lower peak than `mask`, from the whole search for budgets just below its peak; None if none is found."""
        search = self.search
        for share in search.options.descent_targets:
            if search.work.is_spent:
                break
            lower = self._searched(mask, share)
            if search.peak(lower) < search.peak(mask):
                return lower
        return None

    def _press(self, mask: Bools, share: float) -> Bools:
        """Runs local search for `share` times the plan's peak; returns the plan itself if its peak does not fall."""
        options, target = self.search.options, int(self.search.peak(mask) * share)
        pressed = self.search.improve(mask, target, options.min_peak_rounds, options.strict_factor)
        return min(mask, pressed, key=self.search.peak)
