"""How much work a search may do, counted and not timed, so that it ends at the same plan everywhere.

A unit is one value or step of one simulated plan, or one edge of one solved cut.  What several searches share is charged to each of
them as if it had worked it out itself: what a search finds does not depend on what was asked for before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

UNITS_PER_SECOND = 7_000_000
"""About what one core of a small server does."""

LEAST_SECONDS, SECONDS_PER_NODE = 8, 1 / 20_000
"""By default a search may do so many seconds' work, and so much more for each value and step."""

_T = TypeVar("_T")


class Effort:
    """The work of the search that runs.

    Args:
        limit_units: Where it is to stop; None for never.

    Attributes:
        spent_units: What it has done so far; may exceed the limit by what was begun before that.
    """

    def __init__(self, limit_units: int | None = None) -> None:
        self.limit_units = limit_units
        self.spent_units = 0
        self._shared: dict[Hashable, tuple[Any, int]] = {}
        self._charged: set[Hashable] = set()

    @property
    def is_spent(self) -> bool:
        """Whether the search should end with the best that it has."""
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


def default_units(nodes: int) -> int:
    """What a search on so many values and steps may do where nobody says otherwise."""
    return int((LEAST_SECONDS + nodes * SECONDS_PER_NODE) * UNITS_PER_SECOND)


def units_of(seconds: float) -> int:
    """The work of so many seconds."""
    return max(1, int(seconds * UNITS_PER_SECOND))
