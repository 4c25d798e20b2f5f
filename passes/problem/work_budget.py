"""How much work a search may do, counted and not timed, so that it ends at the same plan everywhere.

A unit is one value or step of one simulated plan, or one edge of one solved cut.  What several searches share is charged to each of
them as if it had worked it out itself: what a search finds does not depend on what was asked for before.

Somebody else may stop a search earlier: a clock, say, which nothing here knows of.  What is found then is not the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

UNITS_PER_SECOND = 7_000_000
"""About what one core of a small server does."""

LEAST_SECONDS, SECONDS_PER_NODE = 8, 1 / 20_000
"""By default a search may do so many seconds' work, and so much more for each value and step."""

WORK, CLOCK = "work", "clock"
"""What ended a search before it was done: its limit of work, or somebody else."""

_T = TypeVar("_T")


class WorkBudget:
    """The work of the search that runs.

    Args:
        limit_units: Where it is to stop; None for never.
        is_over: Asked now and then: whether it is to stop at once.  Once it said so, every later search stops as well.

    Attributes:
        spent_units: What it has done so far; may exceed the limit by what was begun before that.
        ends: What ended any of the searches, WORK or CLOCK; empty where each came to its end.
    """

    def __init__(self, limit_units: int | None = None, is_over: Callable[[], bool] | None = None) -> None:
        self.limit_units, self.is_over = limit_units, is_over
        self.ends: set[str] = set()
        self.spent_units = 0
        self._shared: dict[Hashable, tuple[Any, int]] = {}
        self._charged: set[Hashable] = set()

    @property
    def is_spent(self) -> bool:
        """Whether the search should end with the best that it has."""
        if self._is_worked_off:
            return True
        if CLOCK not in self.ends and self.is_over is not None and self.is_over():
            self.ends.add(CLOCK)
        return CLOCK in self.ends

    @property
    def _is_worked_off(self) -> bool:
        return self.limit_units is not None and self.spent_units >= self.limit_units

    def charge(self, units: int) -> None:
        """Count work."""
        self.spent_units += units

    @contextmanager
    def search(self) -> Iterator[None]:
        """A search with a count of its own; the one around it goes on where it was."""
        before = self.spent_units, self._charged
        self.spent_units, self._charged = 0, set()
        try:
            yield
        finally:
            if self._is_worked_off:
                self.ends.add(WORK)
            self.spent_units, self._charged = before

    def shared(self, name: Hashable, build: Callable[[], _T]) -> _T:
        """What `build` returns, worked out once and charged once to every search that asks for it."""
        if name not in self._shared:
            before = self.spent_units
            made = build()
            self._shared[name] = made, self.spent_units - before
        elif name not in self._charged:
            self.charge(self._shared[name][1])
        self._charged.add(name)
        found: _T = self._shared[name][0]
        return found


def limit_seconds(nodes: int, work_seconds: float | None) -> float:
    """How many seconds' work a search on so many values and steps may do: as many as are asked for, if any are."""
    return LEAST_SECONDS + nodes * SECONDS_PER_NODE if work_seconds is None else work_seconds


def units_of(seconds: float) -> int:
    """The work of so many seconds."""
    return max(1, int(seconds * UNITS_PER_SECOND))
