"""The deadline of a search: the wall-clock limit of planning, its messages, and how plans cut short stay out of caches.

Counted work limits a search, so that its plan is the same on every machine.  The deadline is a safety net for a machine
that does this work far too slowly.  The incumbent at the deadline depends on the load of the machine, so it must not be cached.
But torch computes its cache key before it calls the partitioner, and offers no way to withdraw an entry afterwards.  Where torch
would store the plan, the partitioner therefore raises `DeadlineReached`, and the graph is compiled once more without the cache,
under `Resume`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic

from compile_remat.errors import BudgetError, warn
from compile_remat.passes import Planner, Problem
from compile_remat.passes.problem.work_budget import CLOCK, WORK, limit_seconds
from compile_remat.planning.request import ChosenPlan, Resume
from compile_remat.ranks.board import num_ranks
from compile_remat.report import joined

LEAST_SECONDS = 60.0
"""The shortest limit in seconds: on a small graph a few seconds of load on the machine must not decide the plan."""

LIMITS = 10
"""The deadline as a multiple of one search's work limit: a plan takes several searches, and a busy machine is slower."""


@dataclass(frozen=True)
class Deadline:
    """A wall-clock limit; calling the object returns True once planning has taken too long.

    Attributes:
        begin_s: Start of planning, in seconds of `time.monotonic`.
        limit_s: Seconds that planning may take.
    """

    begin_s: float
    limit_s: float

    @property
    def elapsed_s(self) -> float:
        """Seconds since planning began."""
        return monotonic() - self.begin_s

    def __call__(self) -> bool:
        return self.elapsed_s >= self.limit_s


def deadline_of(problem: Problem, work_seconds: float | None) -> Deadline | None:
    """Returns the deadline of a planner that begins now; None if several ranks plan, because all must find the same plan."""
    if num_ranks() > 1:
        return None
    nodes = len(problem.values) + len(problem.steps)
    return Deadline(monotonic(), max(LEAST_SECONDS, LIMITS * limit_seconds(nodes, work_seconds)))


class DeadlineReached(Exception):
    """Carries the request to resume with through torch to the caller, which compiles again without the cache."""

    def __init__(self, resume: Resume) -> None:
        super().__init__(resume)
        self.resume = resume


def with_search_message(choice: ChosenPlan, planner: Planner) -> ChosenPlan:
    """Returns the choice; if a search for it ended early, so that a better plan may exist, warns and adds a message."""
    text = _text(choice, planner)
    if not text:
        return choice
    warn(text)
    return replace(choice, message=joined(choice.message, text))


def _text(choice: ChosenPlan, planner: Planner) -> str:
    is_over = planner.work.is_over
    if CLOCK in planner.ends:
        after = f" after {is_over.elapsed_s:.0f} s" if isinstance(is_over, Deadline) else ""
        return f"planning was stopped by the clock{after}: the best plan so far runs, and is not cached"
    is_lowest = choice.floor_bytes is not None
    if WORK in planner.ends and (is_lowest or choice.plan.gap > planner.options.close_gap):
        better = "a lower" if is_lowest else "a faster"
        return f"the search for a plan ended at its limit of work (time_limit); a larger one may find {better} plan"
    return ""


@contextmanager
def noting_early_end(planner: Planner) -> Iterator[None]:
    """Adds a note to a `BudgetError` from the body if a search ended early: a plan that fits may exist after all."""
    try:
        yield
    except BudgetError as error:
        if CLOCK in planner.ends:
            error.add_note(
                "Planning was stopped by the clock; on a machine that is less busy a plan that fits may be found."
            )
        elif WORK in planner.ends:
            error.add_note("The search ended at its limit of work; a larger time_limit may find a plan that fits.")
        raise
