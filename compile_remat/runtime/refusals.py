"""Sizes at which no plan keeps the budget, each with its error, so that a size is planned once and not at every step."""

from __future__ import annotations

from collections.abc import Iterator

from compile_remat._util.size_range import Sizes
from compile_remat.errors import BudgetError, without_traceback
from compile_remat.planning.request import Request

KNOWN = 64
"""Errors that are kept, at most; for an older one, planning runs again."""


class Refusals:
    """Errors by request and sizes; the bytes that other graphs hold are part of the request."""

    def __init__(self) -> None:
        self._errors: dict[tuple[Request, Sizes], BudgetError] = {}

    def check(self, request: Request, sizes: Sizes) -> None:
        """Raise the kept error if the request was refused at these sizes.

        Raises:
            BudgetError: The error of the earlier refusal.
        """
        error = self._errors.get((request, sizes))
        if error is not None:
            raise without_traceback(error)

    def add(self, request: Request, sizes: Sizes, error: BudgetError) -> None:
        """Keep an error without its traceback."""
        self._errors[request, sizes] = without_traceback(error)
        if len(self._errors) > KNOWN:
            del self._errors[next(iter(self._errors))]

    def sizes_of(self, request: Request) -> Iterator[tuple[int, ...]]:
        """Returns the sizes at which the request was refused, in the order of the symbols."""
        return (tuple(size for _, size in sizes) for asked, sizes in self._errors if asked == request)
