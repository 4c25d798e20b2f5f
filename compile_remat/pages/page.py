"""Builds the HTML page: one file with style and script inside, no framework and no network access."""

from __future__ import annotations

import os
from pathlib import Path

from compile_remat._util.atomic_write import write_atomically
from compile_remat.pages.figures import PageFigures
from compile_remat.pages.html import Markup, element, joined
from compile_remat.pages.sections import facts_section, frontier_section, modules_section, peaks_section
from compile_remat.pages.step_section import section_of_step

_HERE = Path(__file__).parent

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The page's content security policy: the browser fetches nothing."""


def html_page(figures: PageFigures) -> str:
    """Returns the page as HTML text."""
    title = f"{figures.title} - compile-remat"
    head = joined(
        [
            Markup('<meta charset="utf-8">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup('<link rel="icon" href="data:,">'),
            element("title", title),
            Markup(f"<style>{_resource('page.css')}</style>"),
        ]
    )
    step = Markup() if figures.step is None else section_of_step(figures, figures.step)
    body = element(
        "main",
        element("h1", figures.title),
        element("p", figures.summary),
        *(element("p", note, class_="note") for note in figures.notes),
        peaks_section(figures),
        step,
        frontier_section(figures),
        modules_section(figures.modules),
        facts_section(figures),
    )
    script = Markup() if figures.step is None else Markup(f"<script>{_resource('page.js')}</script>")
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}{script}</body></html>\n'


def write_page(figures: PageFigures, path: str | os.PathLike[str]) -> None:
    """Write the page to a file; raises OSError if it cannot be written."""
    write_atomically(Path(path), html_page(figures))


def _resource(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
