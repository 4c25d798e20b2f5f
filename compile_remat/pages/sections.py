"""The parts of a page that are tables and small charts: peaks, frontier, modules, and other facts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compile_remat._util.units import format_bytes, format_time
from compile_remat.pages.chart import HEIGHT, Label
from compile_remat.pages.figures import PREDICTED, BaseStep, FrontierPoint, ModuleRow, PageFigures
from compile_remat.pages.html import Markup, element, joined, table
from compile_remat.pages.scale import byte_scale
from compile_remat.pages.step_section import label_span

MOST_MODULES = 150
"""Rows of the table of modules, at most; one more row sums up the remaining modules, which are the smallest."""

WIDTH = 1000
"""Units of the frontier's drawing from the lowest to the highest peak shown."""


def peaks_section(figures: PageFigures) -> Markup:
    """Returns all peaks, the budget and the lowest reachable peak as bars on one scale."""
    rows = [(name, nbytes, "plan" if name == PREDICTED else "") for name, nbytes in figures.peaks]
    rows += [("budget", figures.budget_bytes, "limit")] if figures.budget_bytes is not None else []
    rows += [("lowest reachable peak", figures.floor_bytes, "limit")] if figures.floor_bytes is not None else []
    if not rows:
        return Markup()
    most = max(nbytes for _, nbytes, _ in rows)
    cells = [(name, _bar(nbytes, most, class_)) for name, nbytes, class_ in rows]
    return _section("peaks", "Peaks", table("most bytes live at once", ("", ""), cells, class_="bars"))


def _bar(nbytes: int, most: int, class_: str) -> Markup:
    bar = element("span", class_=f"bar {class_}".strip(), style=f"width:{62 * nbytes / max(1, most):.1f}%")
    return element("td", bar, element("span", format_bytes(nbytes)))


def _section(name: str, title: str, *content: str) -> Markup:
    return element("section", element("h2", title, id=f"{name}-title"), *content, aria_labelledby=f"{name}-title")


# -- the frontier ---------------------------------------------------------------------------------------------------------


def frontier_section(figures: PageFigures) -> Markup:
    """Returns the chart and the table of extra time against peak, for other budgets."""
    points = figures.frontier
    if not points:
        return Markup()
    base = figures.base
    rows = [
        (
            format_bytes(p.peak_bytes) + " (this plan)" * p.is_chosen,
            format_time(p.time_ns),
            f"{base.share_of(p.time_ns):+.2%}",
        )
        for p in points
    ]
    found = table("plans from the fastest to the one of lowest peak", ("region peak", "step", "extra time"), rows)
    return _section(
        "frontier",
        "What other budgets would cost",
        element(
            "p",
            f"Estimated time of a step beyond that of {base.name}, in per cent, against the region peak of the plan.",
            class_="quiet",
        ),
        _frontier_plot(points, base),
        element("details", element("summary", "The frontier as a table"), found),
    )


def _frontier_plot(points: Sequence[FrontierPoint], base: BaseStep) -> Markup:
    across = byte_scale(max(p.peak_bytes for p in points))
    shares = [100 * base.share_of(p.time_ns) for p in points]
    span = max(shares) - min(0.0, *shares)
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000) if span / s <= 4.5)
    bottom = step * math.floor(min(0.0, *shares) / step)
    height = max(max(shares) - bottom + 0.25 * span, step)
    places = [
        (across.share(p.peak_bytes), 1 - (share - bottom) / height) for p, share in zip(points, shares, strict=True)
    ]
    order = sorted(places)
    line = "M" + "L".join(f"{round(WIDTH * x)} {round(HEIGHT * y)}" for x, y in order)
    numbers = range(round(bottom / step), int((bottom + height) / step) + 1)
    levels = [(k * step, 1 - (k * step - bottom) / height) for k in numbers]
    grid = "".join(f"M0 {round(HEIGHT * y)}H{WIDTH}" for _, y in levels)
    fixed = 'fill="none" vector-effect="non-scaling-stroke"'
    dots = joined(
        Markup(
            f'<path d="M{round(WIDTH * x)} {round(HEIGHT * y)}h0" stroke="{"#2b6cd0" if p.is_chosen else "currentColor"}" '
            f'stroke-linecap="round" stroke-width="{12 if p.is_chosen else 7}" {fixed}>'
            f"<title>{format_bytes(p.peak_bytes)}, {share:+.2f} %</title></path>"
        )
        for p, share, (x, y) in zip(points, shares, places, strict=True)
    )
    chosen = next(((p, s, xy) for p, s, xy in zip(points, shares, places, strict=True) if p.is_chosen), None)
    said = f"{len(points)} plans from {format_bytes(min(p.peak_bytes for p in points))} at {max(shares):+.2f} % to "
    said += f"{format_bytes(max(p.peak_bytes for p in points))} at {min(shares):+.2f} %."
    labels = []
    if chosen is not None:
        p, share, (x, y) = chosen
        text = f"this plan: {format_bytes(p.peak_bytes)}, {share:+.2f} %"
        labels.append(label_span(_label_beside(text, x, y)))
        said += f" This plan: {format_bytes(p.peak_bytes)} at {share:+.2f} %."
    drawing = Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f'<path d="{grid}" stroke="currentColor" stroke-opacity=".14" {fixed}/>'
        f'<path d="{line}" stroke="currentColor" stroke-width="1.25" {fixed}/>{dots}</svg>'
    )
    digits = 0 if step >= 1 else 1 if step >= 0.1 else 2
    ticks = [
        element("span", f"{level:.{digits}f} %", class_="tick", style=f"top:{100 * y:.2f}%") for level, y in levels
    ]
    ticks += [
        element("span", name, class_="tick x", style=f"left:{100 * across.share(nbytes):.2f}%")
        for nbytes, name in across.ticks
    ]
    return element("div", drawing, element("div", *ticks, *labels, aria_hidden="true"), class_="plot small")


def _label_beside(text: str, x: float, y: float) -> Label:
    """Returns a label beside the falling line: above and right of a point, or left of it if there is no space to the right."""
    if x < 0.65:
        return Label(text, x + 0.012, y - 0.02, "start", "plan")
    has_space = y < 0.85
    return Label(text, x - 0.012, y + 0.03 if has_space else y - 0.12, "end", "plan", is_below=has_space)


# -- modules --------------------------------------------------------------------------------------------------------------


def modules_section(rows: Sequence[ModuleRow]) -> Markup:
    """Returns a table of the values that each module saves and recomputes."""
    if not rows:
        return Markup()
    heads = ("module", "saved", "saved bytes", "recomputed", "recomputed bytes", "time")
    shown, rest = rows[:MOST_MODULES], rows[MOST_MODULES:]
    cells = [_module_row(row.path or "(no module)", [row]) for row in shown]
    cells += [_module_row(f"{sum(r.modules for r in rest)} more", rest)] if rest else []
    found = table(
        "equal layers are one row; bytes and times are sums over all of them",
        heads,
        cells,
        foot=_module_row("all", rows),
        class_="wide",
    )
    return _section("modules", "What happens in each module", found)


def _module_row(name: str, rows: Sequence[ModuleRow]) -> tuple[str, ...]:
    modules = rows[0].modules if name == rows[0].path else 1
    time_ns = sum(r.recompute_time_ns for r in rows)
    saved, recomputed = sum(r.num_saved for r in rows), sum(r.num_recomputed for r in rows)
    return (
        joined([name, element("small", f" {modules} equal ones") if modules > 1 else ""]),
        str(saved) if saved else "",
        format_bytes(sum(r.saved_bytes for r in rows)) if saved else "",
        str(recomputed) if recomputed else "",
        format_bytes(sum(r.recomputed_bytes for r in rows)) if recomputed else "",
        format_time(time_ns) if time_ns else "",
    )


def facts_section(figures: PageFigures) -> Markup:
    """Returns the plan's other facts, as a list of names and texts."""
    if not figures.facts:
        return Markup()
    pairs = (joined([element("dt", name), element("dd", value)]) for name, value in figures.facts)
    return _section("facts", "The plan in numbers", element("dl", *pairs))
