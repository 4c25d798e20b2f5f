"""Pieces of HTML: this module escapes every text, and no other module does."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence


class Markup(str):
    """Finished HTML, which is not escaped again."""


def text(value: str) -> Markup:
    """Returns a text escaped for HTML, also for use inside of quotes; returns `Markup` unchanged."""
    return value if isinstance(value, Markup) else Markup(html.escape(value, quote=True))


def element(name: str, *content: str, **attributes: str | None) -> Markup:
    """Returns ``<name attributes>content</name>``; texts are escaped, `Markup` is not.

    Args:
        attributes: `class_` becomes ``class``, other underscores become hyphens; an attribute of None is left out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>{''.join(map(text, content))}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Returns several pieces joined into one; texts are escaped, `Markup` is not."""
    return Markup("".join(map(text, parts)))


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    foot: Sequence[str] = (),
    class_: str | None = None,
    body_id: str | None = None,
) -> Markup:
    """Returns a table; the first cell of a row is its name, the others are right-aligned unless given as ``td`` elements."""
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in heads)))
    body = element("tbody", *(_row(row, heads) for row in rows), id=body_id)
    last = element("tfoot", _row(foot, heads)) if foot else ""
    return element("table", element("caption", caption), head, body, last, class_=class_)


def _row(cells: Sequence[str], heads: Sequence[str]) -> Markup:
    first, *others = cells
    made = [
        cell
        if isinstance(cell, Markup) and cell.startswith("<td")
        else element("td", cell, class_="num", data_name=name)
        for cell, name in zip(others, heads[1:], strict=True)
    ]
    return element("tr", element("th", first, scope="row"), *made)


def json_script(name: str, data: object) -> Markup:
    """Returns a script element with JSON data for the page's script; no text in the data can close the element."""
    dumped = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{name}">{dumped}</script>')
