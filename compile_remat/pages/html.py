"""Pieces of HTML: every text is escaped here, and nowhere else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence


class Markup(str):
    """HTML that is complete: it is not escaped again."""


def text(value: str) -> Markup:
    """A text as HTML, also inside of quotes."""
    return value if isinstance(value, Markup) else Markup(html.escape(value, quote=True))


def element(name: str, *content: str, **attributes: str | None) -> Markup:
    """``<name attributes>content</name>``; texts are escaped, `Markup` is not.

    Args:
        attributes: `class_` is ``class``, other underscores are hyphens; None leaves one out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{shown}>{''.join(map(text, content))}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Several pieces, one behind the other."""
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
    """A table whose rows begin with a name each; cells that are numbers stand right."""
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
    """Data for the page's script; nothing in it can end the element."""
    dumped = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{name}">{dumped}</script>')
