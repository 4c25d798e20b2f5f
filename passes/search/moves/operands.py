"""Last moves on a plan: what one kernel reads is flipped together, and operations that spare no memory are saved instead.

A search moves large values, one or two near ones at a time.  Two operands of one kernel may stand far from each other, or be small:
the mean and the deviation of a norm are computed by one kernel, and saving only one of them spares nothing.

The second part is about what the simulator does not know.  A code generator writes a value to memory if the value's expression
has too many operations.  In a GPT, a kernel that computed both ``log(sum)`` and a cast exceeded Triton's limit and held the logits
twice.  To save the logarithm instead of the sum takes no more bytes and no time, and neither of both alone is enough.
"""

from __future__ import annotations

from functools import cached_property
from itertools import combinations

import numpy as np

from compile_remat.passes.memory.buffers import Ints, register_path, register_reads
from compile_remat.passes.memory.simulator import Batch, Bools, Simulator
from compile_remat.passes.problem.problem import POINTWISE
from compile_remat.passes.search.options import SearchOptions


class OperandMoves:
    """Flips of one value, and of two operands of one kernel, on plans that fit.

    Args:
        pinned: Mask of the values that must be saved, [values].
    """

    def __init__(self, simulator: Simulator, pinned: Bools, options: SearchOptions) -> None:
        self.simulator, self.options = simulator, options
        self.is_free = simulator.is_saveable & ~pinned
        self.simulations = 0

    @cached_property
    def pairs(self) -> Ints:
        """Pairs of values that a plan may flip and that one kernel reads or computes, [pairs, 2], ascending."""
        is_free, most = self.is_free.tolist(), self.options.most_operands
        found = set[tuple[int, int]]()
        for operands in kernel_operands(self.simulator):
            found.update(combinations([v for v in operands if is_free[v]][:most], 2))
        return np.array(sorted(found), dtype=np.int64).reshape(-1, 2)

    def faster(self, mask: Bools, limit_bytes: int, most: int) -> Bools:
        """Returns `mask`, whose peak is at most `limit_bytes`, or a faster plan that fits too.

        Moves that save the fewest bytes come first.

        Args:
            most: Largest number of plans to simulate.
        """
        for turn in range(self.options.operand_rounds):
            best = self.simulator.one(mask)
            columns = self._flipped(mask, best, turn, most * self.options.priced_per_simulation)
            times_ns, saved_bytes = self.simulator.costs(columns)
            may_fit = saved_bytes + self.simulator.output_bytes <= limit_bytes
            worth = np.flatnonzero((times_ns < best.time_ns[0] - self.options.min_gain_ns) & may_fit)
            chosen = worth[np.lexsort((times_ns[worth], saved_bytes[worth]))][:most]
            if not len(chosen):
                break
            most = max(1, most - len(chosen))
            self.simulations += len(chosen)
            fits = self.simulator.run(columns[:, chosen]).peak <= limit_bytes
            if not fits.any():
                break
            fitting = chosen[fits]
            mask = columns[:, fitting[np.argmin(times_ns[fitting])]].copy()
        return mask

    def _flipped(self, mask: Bools, batch: Batch, turn: int, most: int) -> Bools:
        """The plans after each move, [values, moves]; if there are more moves than `most`, each turn has another part of them."""
        known = (batch.used | batch.recomputed)[:, 0] & self.is_free
        singles = np.flatnonzero(known)
        pairs = self.pairs[known[self.pairs].all(axis=1)]
        moves = np.concatenate([np.stack([singles, singles], axis=1), pairs])
        parts = -(-len(moves) // most)
        moves = moves[turn % parts :: parts] if parts > 1 else moves
        columns = np.repeat(mask[:, None], len(moves), axis=1)
        for flipped in moves.T:
            columns[flipped, np.arange(len(moves))] = ~mask[flipped]
        return columns


def kernel_operands(simulator: Simulator) -> list[list[int]]:
    """For each kernel of the backward, the values that it reads, or computes in registers if they are not saved; each list once."""
    values, steps, lifetimes = simulator.problem.values, simulator.problem.steps, simulator.lifetimes
    stored = lifetimes.always_stored.tolist()
    found = dict[tuple[int, ...], None]()
    for b, step in enumerate(steps):
        if step.kernel != POINTWISE or lifetimes.step_stored[b]:
            reads = register_reads(b, steps, lifetimes.step_stored)
            found[tuple(register_path(reads, values, stored))] = None
    for v, value in enumerate(values):
        if value.kernel != POINTWISE or stored[v] or lifetimes.is_sometimes_stored[v]:
            found[v, *register_path(value.reads, values, stored)] = None
    return [list(operands) for operands in found]


def spared(simulator: Simulator, pinned: Bools, mask: Bools, limit_bytes: int, rise_ns: float) -> Bools:
    """Saves results in place of what they are computed from, where that takes no more bytes; returns the changed plan.

    Recomputing such a result costs the backward an operation and spares nothing.

    Args:
        pinned: Mask of the values that must be saved, [values].
        limit_bytes: The peak that the plan must not exceed.
        rise_ns: The most that the plan's time may rise: so little that it counts as nothing.
    """
    before = simulator.one(mask)
    most_ns, most_bytes = before.time_ns[0] + rise_ns, before.saved_bytes[0]
    is_in_forward = np.array([value.in_forward for value in simulator.problem.values], dtype=bool)
    may_replace = is_in_forward & simulator.is_saveable & ~pinned & (simulator.save_time_ns <= rise_ns)
    choices = np.flatnonzero(before.recomputed[:, 0] & may_replace)
    columns = np.repeat(mask[:, None], len(choices), axis=1)
    columns[choices, np.arange(len(choices))] = True
    times_ns, saved_bytes = simulator.costs(columns)
    better = choices[(times_ns <= most_ns) & (saved_bytes <= most_bytes)]
    while len(better):
        changed = mask.copy()
        changed[better] = True
        after = simulator.one(changed)
        if after.time_ns[0] <= most_ns and after.saved_bytes[0] <= most_bytes and after.peak[0] <= limit_bytes:
            return changed
        better = better[: len(better) // 2]  # together, they may do what none of them does
    return mask
