"""A plan with what the simulator says of it, on the problem with copies where values are computed a third time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.simulator import Batch, Bools, Simulator
from compile_remat.passes.problem.duplication import with_copies
from compile_remat.passes.problem.problem import SAVE, Problem, Value
from compile_remat.passes.problem.work_budget import WorkBudget


def may_run_again(value: Value) -> bool:
    """Whether the value may be computed a third time."""
    return value.pin != SAVE and not value.may_differ


@dataclass(frozen=True)
class Candidate:
    """A plan some of whose values are computed three times.

    Attributes:
        saved: Mask over the values of the problem with copies, [values].
        again: Names of the values with a copy.
        simulator: Of that problem.
        batch: What the plan does there.
    """

    saved: Bools
    again: tuple[str, ...]
    simulator: Simulator
    batch: Batch

    @property
    def peak_bytes(self) -> int:
        return int(self.batch.peak[0])

    @property
    def time_ns(self) -> int:
        return int(self.batch.time_ns[0])


def candidate(problem: Problem, saved: Bools, again: Collection[str], work: WorkBudget | None = None) -> Candidate:
    """The plan that saves the values in the mask `saved`, [values], and computes those in `again` twice in the backward.

    Raises:
        ValueError: A value of `again` is not in the problem, or may not be computed twice in the backward.
    """
    known = {v.name for v in problem.values if may_run_again(v)}
    if wrong := sorted(set(again) - known):
        raise ValueError(f"{wrong[0]!r} cannot be computed more than twice")
    is_copied = has_copy(problem, again)
    simulator = Simulator(with_copies(problem, again), work)
    wide = widened(saved, is_copied)
    names = tuple(v.name for v, copied in zip(problem.values, is_copied.tolist(), strict=True) if copied)
    return Candidate(wide, names, simulator, simulator.one(wide))


def has_copy(problem: Problem, names: Collection[str]) -> Bools:
    """Whether a value has a copy in the problem with copies of the named ones, [values]."""
    wanted = frozenset(names)
    return np.array([v.name in wanted for v in problem.values], dtype=bool)


def widened(mask: Bools, is_copied: Bools) -> Bools:
    """A mask over the values as one over the values with copies."""
    wide = np.zeros(len(mask) + int(is_copied.sum()), dtype=bool)
    wide[np.arange(len(mask)) + np.cumsum(is_copied) - is_copied] = mask
    return wide
