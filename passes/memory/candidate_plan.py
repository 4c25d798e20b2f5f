"""A plan with its simulation.  A value that the plan computes a third time has a copy in the simulated problem."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.simulator import Batch, Bools, Ints, Simulator
from compile_remat.passes.problem.duplication import with_copies
from compile_remat.passes.problem.problem import SAVE, Problem, Value
from compile_remat.passes.problem.work_budget import WorkBudget


def may_run_again(value: Value) -> bool:
    """Returns whether a plan may compute the value a third time."""
    return value.pin != SAVE and not value.may_differ


@dataclass(frozen=True)
class Candidate:
    """A plan that may compute some values three times, with its simulation.

    Attributes:
        saved: Mask of the saved values, over the values of the problem with copies, [values].
        again: Names of the values with a copy.
        simulator: Simulator of the problem with copies.
        batch: Simulation of this plan alone.
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
    """Simulates the plan that saves the mask `saved`, [values], and computes the values named in `again` twice in the backward.

    Raises:
        ValueError: A value named in `again` is not in the problem, or the backward may not compute it twice.
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
    """Mask of the values that get a copy in the problem with copies of the named values, [values]."""
    wanted = frozenset(names)
    return np.array([v.name in wanted for v in problem.values], dtype=bool)


def widened(mask: Bools, is_copied: Bools) -> Bools:
    """Converts a mask over the values to a mask over the values with copies, which is False at each copy."""
    wide = np.zeros(len(mask) + int(is_copied.sum()), dtype=bool)
    wide[_places(is_copied)] = mask
    return wide


def narrowed(wide: Bools, is_copied: Bools) -> Bools:
    """The mask that `widened` converts to a mask in which no copy is True."""
    return np.asarray(wide[_places(is_copied)])


def _places(is_copied: Bools) -> Ints:
    """The position of each value among the values with copies."""
    return np.arange(len(is_copied)) + np.cumsum(is_copied) - is_copied
