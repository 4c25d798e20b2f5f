"""Segment checkpoints: the simulated cost of segments of the forward, and the fastest combination of segments.

Equal layers tie in every cut, so no price finds "save every fourth block", and no knapsack sees that one recomputation
feeds another.  Here the forward is cut at about 50 places where few bytes are live.  A *segment* between two cuts saves its
entry (the *frontier*) and the values of some level inside.  Its saved bytes, time and local peak are read off simulated plans
that tile the whole forward with segments of that length, so that nothing is modelled twice.  A backward step belongs to
the segment with the furthest forward position that this step or any later step reads (`reach`, a suffix maximum).
`reach` falls monotonically, which makes U-Nets and encoder-decoders look like chains.

The dynamic programme over segments is that of Rotor and Rockmate (Zhao et al., ICML 2023) with options taken from simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from compile_remat.passes.memory.simulator import Batch, Bools, Ints, Simulator
from compile_remat.passes.problem.problem import CONSTANT, POINTWISE, Problem
from compile_remat.passes.search.options import DEFAULT, SearchOptions
from compile_remat.passes.search.pareto_archive import ParetoArchive
from compile_remat.passes.search.segment_dp import Key, Option, SegmentTable, fastest_path


class Segments:
    """Cuts, frontiers and measured options of one problem.

    Args:
        lengths: Lengths of the segments to simulate, in cuts.
        archive: Keeps the best of the simulated plans; None to keep none.

    Attributes:
        measured: Options with the cost of each segment among segments of equal length.
        simulations: Number of plans simulated.
    """

    def __init__(
        self,
        simulator: Simulator,
        levels: Sequence[Bools],
        pinned: Bools,
        max_cuts: int = DEFAULT.max_segment_cuts,
        tuning: SearchOptions = DEFAULT,
        lengths: Sequence[int] = DEFAULT.short_segments + DEFAULT.long_segments,
        archive: ParetoArchive | None = None,
    ) -> None:
        self.simulator, self.tuning = simulator, tuning
        self.levels = levels
        self.pinned = pinned
        problem = simulator.problem
        self.reach = _reach(problem)
        self.until = _needed_until(problem, self.reach)
        self.cuts = self._choose_cuts(max_cuts)  # positions; cut k separates <= cuts[k] from > cuts[k]
        self.frontiers = [self._frontier(c) for c in self.cuts]
        self.bounds = np.concatenate([[-1], self.cuts, [simulator.num_values]])
        self.first_steps = np.searchsorted(-self.reach, -self.bounds)  # from there no step reads behind a bound
        self.first_steps[0] = len(self.reach)
        self.simulations = 0
        self.measured = self._measured(lengths, archive)

    # -- where to cut -------------------------------------------------------------------------------------------------

    def _choose_cuts(self, max_cuts: int) -> Ints:
        simulator = self.simulator
        n = simulator.num_values
        delta = np.zeros(n + 1, dtype=np.int64)
        alive = simulator.is_saveable & (self.until > simulator.position)
        np.add.at(delta, simulator.position[alive], simulator.saved_nbytes[alive])
        np.add.at(delta, self.until[alive], -simulator.saved_nbytes[alive])
        live = np.cumsum(delta)[:n]
        windows = np.array_split(np.arange(n - 1), max(1, min(max_cuts, n // self.tuning.values_per_cut)))
        lowest = [int(w[np.argmin(live[w])]) for w in windows if len(w)]
        kept = []
        for k, c in enumerate(lowest):
            near = [live[lowest[j]] for j in (k - 1, k + 1) if 0 <= j < len(lowest)]
            if not near or live[c] <= self.tuning.cut_width * max(min(near), 1):
                kept.append(c)
        return np.array(sorted(set(kept)), dtype=np.int64)

    def _frontier(self, cut: int) -> Bools:
        simulator, values = self.simulator, self.simulator.problem.values
        crossing = (simulator.position <= cut) & (self.until > cut)
        member = crossing & simulator.is_saveable
        for v in np.flatnonzero(crossing)[::-1]:
            reads = values[v].reads
            if member[v] and values[v].kernel in (POINTWISE, CONSTANT) and all(member[r] for r in reads):
                member[v] = False
        return np.asarray(member)

    # -- what a segment costs --------------------------------------------------------------------------------------------

    def _measured(self, lengths: Sequence[int], archive: ParetoArchive | None) -> dict[Key, Option]:
        """Simulates tilings with segments of these lengths, and reads the options off."""
        tilings, columns = [], []
        for segment in lengths:
            if segment > len(self.cuts) + 1:
                continue
            levels = (
                range(len(self.levels))
                if segment in self.tuning.short_segments
                else range(max(0, len(self.levels) - self.tuning.long_levels), len(self.levels))
            )
            for offset in range(0, segment, -(-segment // self.tuning.tiling_offsets)):
                chosen = list(range(offset, len(self.cuts), segment))
                fronts = self.union(chosen)
                for level in levels:
                    tilings.append((chosen, level))
                    columns.append(fronts | self.levels[level])
        table: dict[Key, Option] = {}
        self.simulations += len(columns)
        if not columns:
            return table
        masks, first = np.stack(columns, axis=1), 0
        for batch in self.simulator.batches(masks):
            end = first + len(batch.time_ns)
            if archive is not None:
                archive.add(batch, masks[:, first:end])
            for option in self._read(batch, tilings[first:end]):
                known = table.get(option.key)
                if known is None or known.local_peak_bytes < option.local_peak_bytes:
                    table[option.key] = option
            first = end
        return table

    def union(self, chosen: Sequence[int]) -> Bools:
        """Mask of the values that must be saved and of the frontiers of the chosen cuts, [values]."""
        mask = self.pinned.copy()
        for k in chosen:
            mask |= self.frontiers[k]
        return mask

    def _read(self, batch: Batch, tilings: Sequence[tuple[list[int], int]]) -> Iterator[Option]:
        charges, times = self._prefixes(batch)
        for p, (chosen, level) in enumerate(tilings):
            yield from self._segments(batch, p, chosen, level, charges, times)

    def _prefixes(self, batch: Batch) -> tuple[Ints, Ints]:
        """Saved bytes and time of all values at or before each bound, [bounds, P]."""
        simulator = self.simulator
        order = np.argsort(simulator.position, kind="stable")
        saved = np.cumsum((batch.used * simulator.saved_nbytes[:, None])[order], axis=0)
        spent = batch.recomputed * simulator.time_ns[:, None] + batch.used * simulator.save_time_ns[:, None]
        spent = np.cumsum(spent[order], axis=0)
        index = np.clip(self.bounds, -1, simulator.num_values - 1) + 1
        pad = np.zeros((1, saved.shape[1]), dtype=np.int64)
        return np.concatenate([pad, saved])[index], np.concatenate([pad, spent])[index]

    def _segments(
        self, batch: Batch, p: int, chosen: Sequence[int], level: int, charges: Ints, times: Ints
    ) -> list[Option]:
        marks = [0, *(k + 1 for k in chosen), len(self.bounds) - 1]
        charge, time_ns = charges[marks, p].tolist(), times[marks, p].tolist()
        return [
            Option(
                marks[k], marks[k + 1], level, charge[k + 1] - charge[k], time_ns[k + 1] - time_ns[k], peak - charge[k]
            )
            for k, peak in enumerate(self._local_peaks(batch, p, marks))
            if peak is not None
        ]

    def _local_peaks(self, batch: Batch, p: int, marks: Sequence[int]) -> list[int | None]:
        """Most bytes live over the steps of each segment between two marks; None if the segment has no step.

        Args:
            marks: Numbers of bounds, from the first one to the last one.
        """
        edges = self.first_steps[marks]  # falling like `reach`, so the steps of a segment are one run
        slots = np.concatenate([[0], batch.step_slots[p] + 1])[edges]
        owns = np.flatnonzero(edges[1:] < edges[:-1])[::-1]
        peaks: list[int | None] = [None] * (len(marks) - 1)
        if len(owns):
            for k, peak in zip(
                owns.tolist(), np.maximum.reduceat(batch.live[p], slots[owns + 1]).tolist(), strict=True
            ):
                peaks[k] = peak
        return peaks

    @cached_property
    def table(self) -> SegmentTable:
        """The `measured` options as a table for the dynamic programme."""
        return SegmentTable(self.measured.values())

    # -- choosing -----------------------------------------------------------------------------------------------------

    def plan(self, budget_bytes: int, rounds: int = DEFAULT.segment_rounds) -> Bools | None:
        """The fastest combination of options whose predicted peak fits; None if there is none.

        If a segment turns out worse beside its real neighbours than in its tiling, its option is corrected and the programme
        runs again.  If no simulated peak fits, the plan of lowest peak among those tried is returned.
        """
        table = self.table
        best: Bools | None = None
        best_peak = None
        for _ in range(rounds):
            path = self.shortest(table, budget_bytes)
            if path is None:
                return best
            mask = self._mask(path)
            batch = self.simulator.one(mask)
            peak = int(batch.peak[0])
            if best_peak is None or peak < best_peak:
                best, best_peak = mask, peak
            if peak <= budget_bytes:
                return mask
            changes = self.corrections(batch, path, batch)
            if not changes:
                return best
            table = table.corrected(changes)  # changes hold beside these neighbours alone
        return best

    def _mask(self, path: Sequence[Option]) -> Bools:
        mask = self.union([o.first - 1 for o in path if o.first > 0])
        position = self.simulator.position
        for option in path:
            inside = (position > self.bounds[option.first]) & (position <= self.bounds[option.last])
            mask |= self.levels[option.level] & inside
        return np.asarray(mask)

    def corrections(self, batch: Batch, path: Sequence[Option], base: Batch) -> dict[Key, Option]:
        """The options of a path that cost more bytes beside these neighbours than in the table, with their larger sizes.

        Args:
            batch: Simulation of the path's plan.
            base: Simulation of the plan's saved values on this problem, without copies.
        """
        charges, _ = self._prefixes(base)
        changes = {}
        for o, peak in zip(path, self._local_peaks(batch, 0, [0, *(o.last for o in path)]), strict=True):
            local = 0 if peak is None else peak - int(charges[o.first, 0])
            charge = int(charges[o.last, 0] - charges[o.first, 0])
            if local > o.local_peak_bytes or charge > o.charge_bytes:
                local, charge = max(local, o.local_peak_bytes), max(charge, o.charge_bytes)
                changes[o.key] = replace(o, local_peak_bytes=local, charge_bytes=charge)
        return changes

    def charging_whole_frontiers(self) -> dict[Key, Option]:
        """The options with each segment charged for its whole exit frontier, as if all values behind it were recomputed.

        The part of a frontier that is needed depends on the segments behind it, and a programme that minimises finds each place
        at which too little was charged.
        """
        if not len(self.cuts):
            return self.measured
        columns = np.stack([self.union([k]) for k in range(len(self.cuts))], axis=1)
        self.simulations += len(self.cuts)
        charges = np.concatenate([self._prefixes(batch)[0] for batch in self.simulator.batches(columns)], axis=1)
        return {
            key: replace(
                o, charge_bytes=max(o.charge_bytes, int(charges[o.last, o.last - 1] - charges[o.first, o.last - 1]))
            )
            if o.last <= len(self.cuts)
            else o
            for key, o in self.measured.items()
        }

    def times_until(self, batch: Batch) -> Ints:
        """Time that the batch's first plan spends on the values at or before each bound, ns."""
        return np.asarray(self._prefixes(batch)[1][:, 0])

    def shortest(self, table: SegmentTable, budget_bytes: int) -> list[Option] | None:
        """The fastest path of options whose predicted peak fits; None if there is none."""
        return fastest_path(table, len(self.bounds) - 1, budget_bytes, self.tuning.segment_labels)


def _reach(problem: Problem) -> Ints:
    """For each step, the furthest forward position that it or any later step reads."""
    own = [max((problem.values[v].position for v in s.reads), default=-1) for s in problem.steps]
    return np.maximum.accumulate(np.array(own, dtype=np.int64)[::-1])[::-1]


def _needed_until(problem: Problem, reach: Ints) -> Ints:
    """For each value, the furthest forward position whose segment still needs the value, [values]."""
    until = np.array([v.position for v in problem.values], dtype=np.int64)
    for value in problem.values:
        for v in value.reads:
            until[v] = max(until[v], value.position)
    for b, step in enumerate(problem.steps):
        for v in step.reads:
            until[v] = max(until[v], reach[b])
    return until
