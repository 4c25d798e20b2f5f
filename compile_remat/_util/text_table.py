"""Tables on a terminal: rich's where it is installed, else columns of plain text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

Row = Sequence[str]


def show(title: str, heads: Row, rows: Sequence[Row]) -> None:
    """Print a table; the first column stands left, the others right."""
    if sys.stdout.isatty():
        try:
            _show_rich(title, heads, rows)
            return
        except ImportError:
            pass
    print(plain(title, heads, rows))


def plain(title: str, heads: Row, rows: Sequence[Row]) -> str:
    """The table as text."""
    table = [heads, *rows] if any(heads) else list(rows)
    widths = [max(len(row[k]) for row in table) for k in range(len(heads))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]
    if any(heads):
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _show_rich(title: str, heads: Row, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(heads))
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
