"""Prints tables: rich's on a terminal if rich is installed, else columns of plain text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

Cells = Sequence[str]


def print_table(title: str, heads: Cells, rows: Sequence[Cells], align: str = "") -> None:
    """Print a table.

    Args:
        title: Line above the table; may be empty.
        heads: Names of the columns; if all are empty, the table has no line for them.
        align: "l" or "r" for each column; by default the first column is left-aligned, the others right-aligned.
    """
    align = align or _default(heads)
    if sys.stdout.isatty():
        try:
            _print_rich(title, heads, rows, align)
            return
        except ImportError:
            pass
    print(format_table(title, heads, rows, align))


def format_table(title: str, heads: Cells, rows: Sequence[Cells], align: str = "") -> str:
    """Returns the table as text; see `print_table`."""
    table = [heads, *rows] if any(heads) else list(rows)
    widths = [max(len(row[k]) for row in table) for k in range(len(heads))]
    sides = [str.ljust if side == "l" else str.rjust for side in align or _default(heads)]
    lines = [
        "  ".join(pad(cell, width) for pad, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in table
    ]
    if any(heads):
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *(f"  {line}" for line in lines)] if title else lines)


def _default(heads: Cells) -> str:
    return "l" + "r" * (len(heads) - 1)


def _print_rich(title: str, heads: Cells, rows: Sequence[Cells], align: str) -> None:
    from rich.console import Console

    Console().print(rich_table(title, heads, rows, align))


def rich_table(title: str, heads: Cells, rows: Sequence[Cells], align: str = "") -> Any:
    """Returns the table as a ``rich.table.Table``; see `print_table`.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", show_header=any(heads))
    for head, side in zip(heads, align or _default(heads), strict=True):
        table.add_column(head, justify="left" if side == "l" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
