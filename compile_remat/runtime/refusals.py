"""Sizes at which a budget does not hold, each with its own error, so that a size is planned for once and not at every step."""

from __future__ import annotations

from collections.abc import Iterator

from compile_remat._util.size_range import Sizes
from compile_remat.errors import BudgetError, without_traceback
from compile_remat.planning.request import Request

KNOWN = 64
"""The number of errors that are kept: an older one is worked out anew."""


class Refusals:
    """Errors by what was asked for and the sizes it was asked for; what other graphs hold is part of the request."""

    def __init__(self) -> None:
        self._errors: dict[tuple[Request, Sizes], BudgetError] = {}

    def check(self, request: Request, sizes: Sizes) -> None:
        """Return if this was not refused so far.

        Raises:
            BudgetError: It was, with this error.
        """
        error = self._errors.get((request, sizes))
        if error is not None:
            raise without_traceback(error)

    def add(self, request: Request, sizes: Sizes, error: BudgetError) -> None:
        """Remember an error, without the frames that it was raised in."""
        self._errors[request, sizes] = without_traceback(error)
        if len(self._errors) > KNOWN:
            del self._errors[next(iter(self._errors))]

    def sizes_of(self, request: Request) -> Iterator[tuple[int, ...]]:
        """The sizes at which this was refused, in the order of the symbols."""
        return (tuple(size for _, size in sizes) for asked, sizes in self._errors if asked == request)
