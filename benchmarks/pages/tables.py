"""Tables as Markdown."""

import re
from collections.abc import Sequence

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Titles, and the cells of each row."""

NUMBER = re.compile(r"[+-]?\d|-$|floor$")
"""Beginning of a cell that is shown as a number."""


def markdown_table(table: Table) -> str:
    """Returns the table's lines; columns of numbers are right-aligned."""
    titles, rows = table
    is_number = [all(NUMBER.match(row[i]) for row in rows) for i in range(len(titles))]
    rule = "|" + "|".join("--:" if right else ":--" for right in is_number) + "|"
    head, *lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in (titles, *rows)]
    return "\n".join([head, rule, *lines])


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")
