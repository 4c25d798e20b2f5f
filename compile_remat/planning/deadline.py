"""The deadline of a search: when planning has taken too long, what is said then, and why such a plan is cached nowhere.

A search is limited by counted work, so that its plan is the same on every machine.  The deadline is a safety net for a machine
that does this work far too slowly.  The incumbent that it leaves depends on the load of the machine, so it must not be cached.
But torch computes its cache key before it calls the partitioner, and offers no way to withdraw an entry afterwards: where the
plan would be stored, the partitioner raises `DeadlineReached`, and the graph is compiled once more past the cache, under
`Resume`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic

from compile_remat.errors import BudgetError, warn
from compile_remat.passes import CLOCK, WORK, Planner, Problem, limit_seconds
from compile_remat.planning.request import ChosenPlan, Resume
from compile_remat.ranks.board import num_ranks
from compile_remat.report import joined

LEAST_SECONDS = 60.0
"""The earliest deadline: on a small graph a few seconds of load on the machine must not decide the plan."""

LIMITS = 10
"""Work limits of one search until the deadline: a plan takes several searches, and a busy machine is a few times slower."""


@dataclass(frozen=True)
class Deadline:
    """Whether planning has taken too long: called, it says so.

    Attributes:
        begin_s: When planning began, in seconds of `time.monotonic`.
        limit_s: How many seconds it may take.
    """

    begin_s: float
    limit_s: float

    @property
    def elapsed_s(self) -> float:
        """Seconds so far."""
        return monotonic() - self.begin_s

    def __call__(self) -> bool:
        return self.elapsed_s >= self.limit_s


def deadline_of(problem: Problem, work_seconds: float | None) -> Deadline | None:
    """The deadline of a planner that begins now; None where several ranks plan, which must come to the same plan."""
    if num_ranks() > 1:
        return None
    nodes = len(problem.values) + len(problem.steps)
    return Deadline(monotonic(), max(LEAST_SECONDS, LIMITS * limit_seconds(nodes, work_seconds)))


class DeadlineReached(Exception):
    """Carries the request to resume with through torch to the caller that compiles past the cache."""

    def __init__(self, resume: Resume) -> None:
        super().__init__(resume)
        self.resume = resume


def with_search_message(choice: ChosenPlan, planner: Planner) -> ChosenPlan:
    """The choice with a message, and a warning, where a search for it ended early and another plan may be better."""
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
    """A `BudgetError` from inside gets a note where a search ended early: a plan that fits may exist after all."""
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
