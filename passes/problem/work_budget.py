"""The work that a search may do, counted and not timed, so that the search ends at the same plan on every machine.

A unit is one value or step of one simulated plan, or one edge of one solved cut.  A result that several searches share is charged
to each of them as if the search had computed the result itself, so a search's plan does not depend on earlier searches.

The caller may stop a search earlier, by a clock for example.  The plan is then not the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

UNITS_PER_SECOND = 7_000_000
"""Units of work that one core of a small server does in about a second."""

LEAST_SECONDS, SECONDS_PER_NODE = 8, 1 / 20_000
"""Default limit of a search, in seconds of work: a fixed part, and a part for each value and step."""

WORK, CLOCK = "work", "clock"
"""The cause that ended a search before it was done: its limit of work, or the caller."""

_T = TypeVar("_T")


class WorkBudget:
    """The work of the running search.

    Args:
        limit_units: Units of work after which a search stops; None for no limit.
        is_over: Called now and then; returns True if the search is to stop at once.  After that, every later search stops as well.

    Attributes:
        spent_units: Units of work done so far; may exceed the limit by an operation begun before the limit.
        ends: Causes that ended any of the searches early, WORK or CLOCK; empty if every search came to its end.
    """

    def __init__(self, limit_units: int | None = None, is_over: Callable[[], bool] | None = None) -> None:
        self.limit_units, self.is_over = limit_units, is_over
        self.ends: set[str] = set()
        self.spent_units = 0
        self._shared: dict[Hashable, tuple[Any, int]] = {}
        self._charged: set[Hashable] = set()

    @property
    def is_spent(self) -> bool:
        """True if the search should end with the best plan that it has."""
        if self._is_worked_off:
            return True
        if CLOCK not in self.ends and self.is_over is not None and self.is_over():
            self.ends.add(CLOCK)
        return CLOCK in self.ends

    @property
    def _is_worked_off(self) -> bool:
        return self.limit_units is not None and self.spent_units >= self.limit_units

    def charge(self, units: int) -> None:
        """Counts work."""
        self.spent_units += units

    @contextmanager
    def search(self) -> Iterator[None]:
        """Runs a search with a count of its own; afterwards the enclosing search's count continues where it was."""
        before = self.spent_units, self._charged
        self.spent_units, self._charged = 0, set()
        try:
            yield
        finally:
            if self._is_worked_off:
                self.ends.add(WORK)
            self.spent_units, self._charged = before

    def shared(self, name: Hashable, build: Callable[[], _T]) -> _T:
        """Returns the result of `build`, computed once per `name` and charged once to every search that asks for it."""
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
    """Seconds of work that a search on `nodes` values and steps may do: `work_seconds`, or the default if None."""
    return LEAST_SECONDS + nodes * SECONDS_PER_NODE if work_seconds is None else work_seconds


def units_of(seconds: float) -> int:
    """Converts seconds of work to units of work, at least 1."""
    return max(1, int(seconds * UNITS_PER_SECOND))
