"""The section of a page about one training step: the chart, the tensors of one moment, and the same figures as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from compile_remat._util.units import format_bytes
from compile_remat.pages.chart import HEIGHT, Chart, Label, drawing
from compile_remat.pages.figures import Kind, PageFigures, StepFigures, Tensor
from compile_remat.pages.html import Markup, element, joined, json_script, table, text
from compile_remat.pages.palette import COLOURS

MOST_TENSORS = 12
"""Tensors listed for one moment, at most."""

MOST_KEPT = 4000
"""Tensors on a page, at most: the smallest of more are counted, not listed."""

ROWS = 24
"""Evenly spaced moments in the table below the chart; the peak is one more."""

TENSOR_HEADS = ("tensor", "bytes", "what happens to it", "where it is made")


def section_of_step(figures: PageFigures, step: StepFigures) -> Markup:
    """Returns chart, moment and table; the moment is the peak until the page's script moves it."""
    drawn = drawing(figures, step)
    peak_bin = drawn.bins.live_bytes.index(max(drawn.bins.live_bytes))
    return element(
        "section",
        element("h2", "Live bytes over one training step", id="step-title"),
        _explanation(step),
        _plot(figures, step, drawn, peak_bin),
        _parts(drawn),
        _slider(step, drawn, peak_bin),
        _moment(step, drawn, peak_bin),
        _table(step, drawn),
        json_script("figures", page_data(step, drawn)),
        aria_labelledby="step-title",
    )


def _explanation(step: StepFigures) -> Markup:
    other = f" The line is {step.other.label}, where it runs the same node." if step.other is not None else ""
    return element(
        "p",
        f"{len(step.columns)} nodes in the order in which they run. Parameters, optimizer state and inputs do not count.{other}",
        class_="quiet",
    )


def spoken(figures: PageFigures, step: StepFigures) -> str:
    """Returns the chart as a sentence, for screen readers."""
    live = step.live_bytes
    most = max(live)
    at = live.index(most)
    half = "forward" if at < step.num_forward else "backward"
    parts = [
        f"Live bytes over forward and backward: the plan peaks at {format_bytes(most)} in the {half}, at {step.columns[at]}"
    ]
    if step.other is not None:
        parts.append(f"{step.other.label} at {format_bytes(max(step.other.live_bytes))}")
    for name, nbytes in (
        ("the budget is", figures.budget_bytes),
        ("the lowest reachable peak is", figures.floor_bytes),
    ):
        if nbytes is not None:
            parts.append(f"{name} {format_bytes(nbytes)}")
    return "; ".join(parts) + "."


def _plot(figures: PageFigures, step: StepFigures, drawn: Chart, bin_: int) -> Markup:
    drawing = Markup(
        f'<svg viewBox="0 0 {drawn.width} {HEIGHT}" preserveAspectRatio="none" role="img" aria-labelledby="spoken">'
        f'<title id="spoken">{text(spoken(figures, step))}</title>{drawn.shapes}</svg>'
    )
    ticks = (
        element("span", name, class_="tick", style=f"top:{100 * (1 - drawn.scale.share(nbytes)):.2f}%")
        for nbytes, name in drawn.scale.ticks
    )
    rule = element("span", class_="rule", id="rule", style=f"left:{100 * (bin_ + 0.5) / drawn.width:.2f}%")
    texts = joined([*ticks, *map(label_span, drawn.labels), rule])
    return element("div", drawing, element("div", texts, aria_hidden="true"), class_="plot", id="step")


def label_span(label: Label) -> Markup:
    """Returns a label, placed over a chart."""
    below = " below" if label.is_below else ""
    return element(
        "span",
        label.text,
        class_=f"label {label.side}{below} {label.role}",
        style=f"left:{100 * label.x:.2f}%;top:{100 * label.y:.2f}%",
    )


def _parts(drawn: Chart) -> Markup:
    """Returns the names "forward" and "backward" for below the chart."""
    share = 100 * drawn.bins.num_forward / drawn.width
    return element(
        "div",
        element("span", "forward", style=f"width:{share:.2f}%"),
        element("span", "backward", style=f"width:{100 - share:.2f}%"),
        class_="parts",
        aria_hidden="true",
    )


def _where(step: StepFigures, drawn: Chart, bin_: int) -> str:
    phase = "forward" if bin_ < drawn.bins.num_forward else "backward"
    return f"{phase}, at {step.columns[drawn.bins.columns[bin_]]}"


def _slider(step: StepFigures, drawn: Chart, bin_: int) -> Markup:
    live = format_bytes(drawn.bins.live_bytes[bin_])
    slider = element(
        "input",
        type="range",
        id="slider",
        min="0",
        max=str(drawn.width - 1),
        value=str(bin_),
        aria_label="Moment of the step",
        aria_valuetext=f"{_where(step, drawn, bin_)}: {live} live",
    )
    hint = "Point at the chart, or move the slider (arrow keys): the tensors of that moment stand below."
    return joined([Markup(slider.removesuffix("</input>")), element("p", hint, class_="quiet hint")])


# -- one moment -----------------------------------------------------------------------------------------------------------


def swatch(kind: Kind) -> Markup:
    """Returns a small square in a kind's colour."""
    square = "display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.45em"
    return element("span", class_="swatch", style=f"{square};background:{COLOURS[kind]}")


def _moment(step: StepFigures, drawn: Chart, bin_: int) -> Markup:
    bins = drawn.bins
    rows = [(joined([swatch(kind), kind.value]), _now(kind.value, bins.areas[kind][bin_])) for kind in reversed(Kind)]
    rows.append((element("span", "sum"), _now("total", bins.live_bytes[bin_])))
    if step.other is not None:
        rows.append((element("span", step.other.label), _now("other", bins.other[bin_])))
    kinds = table("live bytes by kind", ("kind", "bytes"), rows)
    alive = alive_at(step.tensors, bins.columns[bin_])
    shown = alive[:MOST_TENSORS]
    left_bytes = bins.live_bytes[bin_] - sum(t.nbytes for t in shown)
    rest = (
        f"{len(alive) - len(shown)} more tensors and workspaces: {format_bytes(left_bytes)}" if left_bytes > 0 else ""
    )
    tensors = table(
        "the largest tensors", TENSOR_HEADS, map(_tensor_row, shown), class_="wide tensors", body_id="alive"
    )
    return element(
        "div",
        element("div", element("h3", _where(step, drawn, bin_), id="where"), kinds),
        element("div", tensors, element("p", rest, class_="quiet", id="rest")),
        class_="moment",
    )


def _now(name: str, nbytes: int) -> Markup:
    return element("td", format_bytes(nbytes), class_="num", id=f"now-{name}")


def alive_at(tensors: Iterable[Tensor], column: int) -> list[Tensor]:
    """Returns the tensors that are live in a column, the largest first."""
    return sorted((t for t in tensors if t.begin <= column <= t.end), key=lambda t: -t.nbytes)


def _tensor_row(tensor: Tensor) -> tuple[str, ...]:
    name = joined([swatch(tensor.kind), tensor.name, " ", element("small", type_of(tensor))])
    source = short_source(tensor.source_line)
    gap = " " if tensor.module_path and source else ""
    where = joined([tensor.module_path, gap, element("small", source) if source else ""])
    return (
        name,
        element("td", format_bytes(tensor.nbytes), class_="bytes"),
        element("td", tensor.fate, class_="text"),
        element("td", where, class_="text"),
    )


def type_of(tensor: Tensor) -> str:
    """Returns dtype and shape as text, such as ``float32[8, 256]``; empty if the dtype is unknown."""
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]" if tensor.dtype else ""


def short_source(source_line: str) -> str:
    """Returns the last two parts of a path: ``pkg/model.py:14``."""
    return "/".join(source_line.replace("\\", "/").rsplit("/", 2)[-2:])


# -- the same in numbers ----------------------------------------------------------------------------------------------------


def _table(step: StepFigures, drawn: Chart) -> Markup:
    """Returns a table of evenly spaced moments of the step with their bytes, the peak among them."""
    bins = drawn.bins
    live = bins.live_bytes
    wanted = {round(k * (len(live) - 1) / (ROWS - 1)) for k in range(ROWS)} | {live.index(max(live))}
    heads = ["moment", "sum", *(kind.value for kind in Kind), *([step.other.label] if step.other is not None else [])]
    rows = [
        [
            _where(step, drawn, b),
            *map(format_bytes, (live[b], *(bins.areas[kind][b] for kind in Kind), *bins.other[b : b + 1])),
        ]
        for b in sorted(wanted)
    ]
    found = table("live bytes at moments of the step, the peak among them", heads, rows)
    return element("details", element("summary", "The chart as a table"), element("div", found, class_="scroll"))


def page_data(step: StepFigures, drawn: Chart) -> dict[str, Any]:
    """Returns the data of all moments for the page's script; each text is an index into `strings`."""
    strings: dict[str, int] = {}

    def number(value: str) -> int:
        return strings.setdefault(value, len(strings))

    tensors = [
        [
            number(t.name),
            t.nbytes,
            t.kind.value,
            t.begin,
            t.end,
            number(t.fate),
            number(type_of(t)),
            number(t.module_path),
            number(short_source(t.source_line)),
        ]
        for t in largest(step.tensors, MOST_KEPT)
    ]
    bins = drawn.bins
    return {
        "columns": bins.columns,
        "num_forward": bins.num_forward,
        "names": [number(step.columns[column]) for column in bins.columns],
        "kinds": [kind.value for kind in Kind],
        "colours": {kind.value: colour for kind, colour in COLOURS.items()},
        "areas": {kind.value: area for kind, area in bins.areas.items()},
        "other": bins.other,
        "tensors": tensors,
        "most_tensors": MOST_TENSORS,
        "strings": list(strings),
    }


def largest(tensors: Sequence[Tensor], most: int) -> Sequence[Tensor]:
    """Returns at most `most` tensors, those with the largest product of bytes and live columns, in their order."""
    if len(tensors) <= most:
        return tensors
    order = sorted(range(len(tensors)), key=lambda k: -tensors[k].nbytes * (tensors[k].end - tensors[k].begin + 1))
    return [tensors[k] for k in sorted(order[:most])]
