"""Local search over saved sets with the batch simulator: single flips and swaps with a near neighbour.

The score of a plan adds up its time, the excess of its peak over the budget, and the root mean square of the excess over all
slots of the backward.  The last term matters: if many layers reach the same peak, lowering the peak of one layer does not
lower the maximum, and without the term the search would stay on a plateau.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.simulator import Batch, Bools, Floats, Ints, Simulator
from compile_remat.passes.search.options import DEFAULT, SearchOptions
from compile_remat.passes.search.pareto_archive import ParetoArchive


@dataclass
class LocalSearch:
    """Improves plans by moves over a pool of values, in forward order.

    Attributes:
        simulations: Number of plans tried (deterministic work).
        archive: Keeps the best of the plans tried; None to keep none.
    """

    simulator: Simulator
    pool: Ints
    pinned: Bools
    weight: float
    options: SearchOptions = DEFAULT
    simulations: int = 0
    archive: ParetoArchive | None = None

    def score(self, batch: Batch, budget_bytes: int, weight: float, length: int | None = None) -> Floats:
        """Time plus weighted excess, in ns; smaller is better.

        Args:
            length: Slots of the longest of all plans to compare; None if the batch contains this plan.
        """
        plans, slots = batch.live.shape
        excess = np.zeros((plans, slots if length is None else length))
        np.maximum(batch.live - budget_bytes, 0, out=excess[:, :slots])
        rms = np.sqrt(np.multiply(excess, excess, out=excess).mean(axis=1))
        highest = np.maximum(batch.peak - budget_bytes, 0)
        return np.asarray(batch.time_ns + weight * (highest + self.options.rms_weight * rms))

    def run(self, mask: Bools, budget_bytes: int, rounds: int, weight_factor: float = 1.0) -> Bools:
        """Improves one plan; returns the best plan found, which may still exceed the budget."""
        weight = self.weight * weight_factor
        current = mask.copy()
        batch = self.simulator.one(current)
        best = float(self.score(batch, budget_bytes, weight)[0])
        for turn in range(rounds):
            if self.simulator.work.is_spent:
                break
            moves = self._moves(current, batch, turn)
            moves, columns = self._worth_trying(current, moves, budget_bytes, weight, best - self.options.min_gain_ns)
            if not len(moves):
                break
            scores, tried = self._tried(columns, budget_bytes, weight)
            better = np.flatnonzero(scores < best - self.options.min_gain_ns)
            if not len(better):
                break
            chosen = self._far_apart(moves[better[np.argsort(scores[better], kind="stable")]])
            prefixes = np.repeat(current[:, None], len(chosen), axis=1)
            for k, move in enumerate(chosen):
                for v in move:
                    if v >= 0:
                        prefixes[v, k:] ^= True
            if len(chosen) > 1:
                scores, tried = self._tried(prefixes, budget_bytes, weight)
            else:  # the best move, which was tried alone
                self.simulations += 1
                scores = self.score(self.simulator.known(prefixes[:, 0], tried), budget_bytes, weight)
            k = int(np.argmin(scores))
            if scores[k] >= best - self.options.min_gain_ns:
                break
            best = float(scores[k])
            current = prefixes[:, k].copy()
            batch = self.simulator.known(current, tried)
        return current

    def _worth_trying(
        self, current: Bools, moves: Ints, budget_bytes: int, weight: float, below_ns: float
    ) -> tuple[Ints, Bools]:
        """The moves whose plans may score below `below_ns`, and these plans, [values, moves].

        No score is below the plan's time and the excess that its saved bytes alone cause.
        """
        columns = np.repeat(current[:, None], len(moves), axis=1)
        columns[moves[:, 0], np.arange(len(moves))] ^= True
        swaps = np.flatnonzero(moves[:, 1] >= 0)
        columns[moves[swaps, 1], swaps] ^= True
        if self.archive is not None or not len(moves):  # an archive collects every plan
            return moves, columns
        times_ns, least_peaks = self.simulator.at_least(columns)
        may_gain = times_ns + weight * np.maximum(least_peaks - budget_bytes, 0) < below_ns
        return moves[may_gain], columns[:, may_gain]

    def _tried(self, columns: Bools, budget_bytes: int, weight: float) -> tuple[Floats, Batch]:
        """Scores of the plans in `columns`, [values, P], and the batch of the first plan of lowest score alone."""
        self.simulations += columns.shape[1]
        found, lowest, first = list[Floats](), np.inf, 0
        length: int | None = None
        if columns.shape[1] > self.simulator.most_at_once:
            length = int(self.simulator.outlines(columns)[1].max())  # of all batches, which are compared
        for batch in self.simulator.batches(columns):
            end = first + len(batch.time_ns)
            if self.archive is not None:
                self.archive.add(batch, columns[:, first:end])
            first = end
            scores = self.score(batch, budget_bytes, weight, length)
            found.append(scores)
            if scores.min() < lowest:
                lowest, tried = scores.min(), batch.plan(int(np.argmin(scores)))
        return np.concatenate(found), tried

    def _moves(self, current: Bools, batch: Batch, turn: int) -> Ints:
        """Pairs (flip, partner or -1), [moves, 2], of values that are saved, or that the backward reads or recomputes.

        If there are more moves than a round may try, each turn tries another part, spread evenly over the forward.
        """
        known = (batch.used | batch.recomputed)[:, 0][self.pool] | current[self.pool]
        places = np.flatnonzero(known & ~self.pinned[self.pool])
        members = self.pool[places]
        saved = current[members]
        flips = np.stack([members, np.full(len(members), -1)], axis=1)
        far = self.options.swap_distance
        near = np.arange(-far, far + 1) + np.flatnonzero(saved)[:, None]
        may_swap = (near >= 0) & (near < len(members)) & ~saved[np.clip(near, 0, len(members) - 1)]
        out, into = np.nonzero(may_swap)
        swaps = np.stack([members[saved][out], members[near[out, into]]], axis=1)
        if len(flips) + len(swaps) > self.options.max_moves:
            stride = max(1, -(-len(swaps) // max(1, self.options.max_moves - len(flips))))
            swaps = swaps[::stride]
        moves = np.concatenate([flips, swaps])
        most = max(
            self.options.min_moves, self.options.move_cells // (self.simulator.num_values + self.simulator.num_steps)
        )
        parts = -(-len(moves) // most)
        if parts > 1:
            moves = moves[turn % parts :: parts]
        return moves

    def _far_apart(self, moves: Ints) -> list[tuple[int, int]]:
        near = self.options.move_distance - 1
        place = dict(zip(self.pool.tolist(), range(near, near + len(self.pool)), strict=True))
        is_near = bytearray(len(self.pool) + 2 * near)
        chosen: list[tuple[int, int]] = []
        for flip, partner in moves.tolist():
            spots = [place[v] for v in (flip, partner) if v >= 0]
            if not any(is_near[s] for s in spots):
                chosen.append((flip, partner))
                for s in spots:
                    is_near[s - near : s + near + 1] = bytes([1]) * (2 * near + 1)
            if len(chosen) >= self.options.max_joint_moves:
                break
        return chosen


def search_pool(simulator: Simulator, pinned: Bools, share: int, among: Bools | None = None) -> Ints:
    """Indices of the values that a search moves one by one, in forward order: large values that the backward may need.

    Args:
        share: Values smaller than the largest by more than this factor are left out.
        among: Mask of the values to choose from, [values]; None for all.
    """
    reachable = simulator.run(pinned[:, None])
    worth = (reachable.used | reachable.recomputed)[:, 0]
    worth &= simulator.is_saveable & (simulator.nbytes >= simulator.nbytes.max(initial=0) / share)
    if among is not None:
        worth &= among
    order = np.argsort(simulator.position, kind="stable")
    return np.asarray(order[worth[order]], dtype=np.int64)
