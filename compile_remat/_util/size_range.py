"""Sizes by the names of their symbols, and the box of sizes within which a plan keeps its budget."""

from __future__ import annotations

from dataclasses import dataclass

Sizes = tuple[tuple[str, int], ...]
"""Symbols of a graph with dynamic shapes, each with a size."""


@dataclass(frozen=True)
class SizeRange:
    """The box of sizes within which one plan keeps its budget; all tuples have the order of the symbols.

    Attributes:
        names: Names of the symbols.
        planned: The sizes that the plan was made for.
        upper: The largest sizes of the box: up to these sizes, the peak is within the budget.
        carried: The largest sizes at which a quick search found some plan within the budget; empty if there was no search.
        sources: The source of each size in the user's code, ``L['x'].size()[0]`` for example.
    """

    names: tuple[str, ...]
    planned: tuple[int, ...]
    upper: tuple[int, ...]
    carried: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = zip(self.names, self.sources or self.names, self.planned, self.upper, strict=True)
        text = ", ".join(
            f"{source or name} up to {upper} (planned for {planned})" for name, source, planned, upper in rows
        )
        return text + f"; with other plans up to {' x '.join(map(str, self.carried))}" * bool(self.carried)

    @property
    def planned_sizes(self) -> Sizes:
        """The sizes that the plan was made for, by symbol."""
        return tuple(zip(self.names, self.planned, strict=True))
