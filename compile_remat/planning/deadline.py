"""Searches that ended before they were done: what is said of them, and what becomes of a plan that the clock cut short.

The limit of a search is counted work, so that its plan is the same everywhere.  The clock is a safety net beside it, for a
machine that does this work far too slowly.  What it leaves depends on the hour: such a plan runs, but is kept nowhere.  Torch's
cache is asked before the partitioner runs, under a key that knows nothing of the clock; so where a plan would end up there, the
partitioner raises `StoppedByClock`, and the graph is compiled once more, past the cache, with the plan that the exception carries.
The commands have no clock: they keep nothing, and who waits for them can end them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic

from compile_remat.device.ranks import num_ranks
from compile_remat.errors import BudgetError, warn
from compile_remat.passes import CLOCK, WORK, Planner, Problem, limit_seconds
from compile_remat.planning.request import ChosenPlan, Resume

LEAST_SECONDS = 60.0
"""No plan is cut short earlier: what the limit of a small graph comes to must not make its plan a matter of chance."""

TIMES = 10
"""Several searches make a plan, each with its limit, and a busy machine does their work a few times slower; beyond that, something
is wrong."""


@dataclass(frozen=True)
class Clock:
    """Says when planning has taken too long.

    Attributes:
        begin_s: When it began.
        limit_s: How long it may take.
    """

    begin_s: float
    limit_s: float

    @property
    def elapsed_s(self) -> float:
        """Seconds so far."""
        return monotonic() - self.begin_s

    def __call__(self) -> bool:
        return self.elapsed_s >= self.limit_s


def clock_of(problem: Problem, work_seconds: float | None) -> Clock | None:
    """The clock for a planner with this limit, made now; None where several ranks plan, which must come to the same plan."""
    if num_ranks() > 1:
        return None
    nodes = len(problem.values) + len(problem.steps)
    return Clock(monotonic(), max(LEAST_SECONDS, TIMES * limit_seconds(nodes, work_seconds)))


class StoppedByClock(Exception):
    """Carries the request to resume with out of torch, to whoever can compile without the cache."""

    def __init__(self, resume: Resume) -> None:
        super().__init__(resume)
        self.resume = resume


def noted(choice: ChosenPlan, planner: Planner) -> ChosenPlan:
    """The choice with a message, and a warning, where a search for it ended early and another plan may be better."""
    text = _text(choice, planner)
    if not text:
        return choice
    warn(text)
    return replace(choice, message=f"{choice.message}; {text}" if choice.message else text)


def _text(choice: ChosenPlan, planner: Planner) -> str:
    is_over = planner.effort.is_over
    if CLOCK in planner.ends:
        after = f" after {is_over.elapsed_s:.0f} s" if isinstance(is_over, Clock) else ""
        return f"planning was stopped by the clock{after}: the best plan so far runs, and is not cached"
    is_lowest = choice.floor_bytes is not None
    if WORK in planner.ends and (is_lowest or choice.plan.gap > planner.options.close_gap):
        better = "a lower" if is_lowest else "a faster"
        return f"the search for a plan ended at its limit of work (time_limit); a larger one may find {better} plan"
    return ""


@contextmanager
def explaining(planner: Planner) -> Iterator[None]:
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
