"""A picture and a short table for notebooks: static, without script, legible on light and dark backgrounds."""

from __future__ import annotations

from compile_remat._util.units import format_bytes
from compile_remat.pages.chart import HEIGHT, Label, drawing
from compile_remat.pages.figures import PageFigures, StepFigures
from compile_remat.pages.html import Markup, element, joined, text
from compile_remat.pages.step_section import spoken, swatch

WIDTH_PX, HEIGHT_PX = 760, 300
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 70, 10, 10, 24
ROWS = 8
"""Rows of facts in the table, below those of the peaks."""


def notebook_html(figures: PageFigures) -> str:
    """Returns the picture and the table as an HTML fragment."""
    picture = Markup() if figures.step is None else _picture(figures, figures.step)
    limits = (("budget", figures.budget_bytes), ("lowest reachable peak", figures.floor_bytes))
    amounts = [*figures.peaks, *((name, nbytes) for name, nbytes in limits if nbytes is not None)]
    rows = [(name, format_bytes(nbytes)) for name, nbytes in amounts] + list(figures.facts[:ROWS])
    cells = (element("tr", element("th", name, style=_CELL), element("td", value, style=_CELL)) for name, value in rows)
    return element(
        "div",
        element("b", figures.title),
        element("div", figures.summary),
        *(element("div", note) for note in figures.notes),
        picture,
        element("table", element("tbody", *cells), style="color:inherit;font-variant-numeric:tabular-nums"),
        style="max-width:760px",
    )


_CELL = "text-align:left;padding:.1em 1.2em .1em 0;font-weight:normal"


def _picture(figures: PageFigures, step: StepFigures) -> Markup:
    drawn = drawing(figures, step)
    across, down = WIDTH_PX - LEFT_PX - RIGHT_PX, HEIGHT_PX - TOP_PX - BOTTOM_PX
    shapes = (
        f'<svg x="{LEFT_PX}" y="{TOP_PX}" width="{across}" height="{down}" viewBox="0 0 {drawn.width} {HEIGHT}" '
        f'preserveAspectRatio="none">{drawn.shapes}</svg>'
    )
    ticks = [
        _text(name, LEFT_PX - 6, TOP_PX + down * (1 - drawn.scale.share(n)) + 4, "end") for n, name in drawn.scale.ticks
    ]
    split = LEFT_PX + across * drawn.bins.num_forward / drawn.width
    halves = [_text("forward", LEFT_PX, HEIGHT_PX - 6, "start"), _text("backward", split, HEIGHT_PX - 6, "start")]
    labels = [_placed(label, across, down) for label in drawn.labels if label.role != "area"]
    legend = joined(
        element("span", swatch_of, kind.value, style="margin-right:1em;white-space:nowrap")
        for kind, area in reversed(step.areas.items())
        if any(area)
        for swatch_of in [swatch(kind)]
    )
    picture = (
        f'<svg viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" width="100%" role="img" font-size="12" '
        f'font-family="system-ui, sans-serif" fill="currentColor"><title>{text(spoken(figures, step))}</title>'
        f"{shapes}{joined([*ticks, *halves, *labels])}</svg>"
    )
    return joined([Markup(picture), element("div", legend, style="font-size:12px;padding-left:70px")])


def _placed(label: Label, across: int, down: int) -> Markup:
    y = TOP_PX + label.y * down + (14 if label.is_below else -5)
    return _text(label.text, LEFT_PX + label.x * across, y, label.side)


def _text(value: str, x: float, y: float, side: str) -> Markup:
    return Markup(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{side}">{text(value)}</text>')
