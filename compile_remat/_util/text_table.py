"""Prints tables: rich's on a terminal if rich is installed, else columns of plain text."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

Cells = Sequence[str]

WIDTH, NARROWEST = 80, 16
"""Columns of a terminal, and the least width to which a column is wrapped."""


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
    print(format_table("\n".join(textwrap.wrap(title, WIDTH)), heads, _fitting(heads, rows, align, title), align))


def _fitting(heads: Cells, rows: Sequence[Cells], align: str, title: str) -> list[Cells]:
    """Returns the rows for a width of `WIDTH`: the widest of the left-aligned columns is wrapped at spaces, if that is needed."""
    widths = [max(len(row[k]) for row in (heads, *rows)) for k in range(len(heads))]
    excess = sum(widths) + 2 * (len(widths) - 1) + 2 * bool(title) - WIDTH
    if excess <= 0:
        return list(rows)
    wrapped = max((k for k, side in enumerate(align) if side == "l"), key=lambda k: widths[k])
    width = max(len(heads[wrapped]), NARROWEST, widths[wrapped] - excess)
    wrapped_text = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    found: list[Cells] = []
    for row in rows:
        lines = wrapped_text.wrap(row[wrapped]) or [""]
        found.append([*row[:wrapped], lines[0], *row[wrapped + 1 :]])
        found += [[*[""] * wrapped, each, *[""] * (len(heads) - wrapped - 1)] for each in lines[1:]]
    return found


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
