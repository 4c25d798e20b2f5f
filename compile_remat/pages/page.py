"""Renders `PageFigures` as an HTML page, one file without network access, or as a fragment for notebooks.

The template ``page.html.jinja`` has the texts and tables of both.  The script ``page.js`` draws the page's charts from the JSON of
`page_data` and shows the tensors of one moment.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import accumulate, pairwise
from operator import add
from pathlib import Path
from typing import Any

import jinja2

from compile_remat._util.atomic_write import write_atomically
from compile_remat._util.units import GIB, KIB, MIB, TIB, format_bytes, format_time
from compile_remat.pages.figures import COLOURS, PREDICTED, Curve, PageFigures, StepFigures, Tensor

PAGE_BINS, NOTEBOOK_BINS = 700, 340
"""Columns of a chart, at most: more could not be told apart."""

MOST_KEPT = 4000
"""Tensors on a page, at most: the smallest of more are counted, not listed."""

MOMENTS = 24
"""Evenly spaced moments in the table of live bytes; the peak is one more."""

MOST_TICKS, HEADROOM = 6, 1.12
"""Ticks of an axis, at most, and its end as a multiple of the highest amount, which leaves space for that amount's label."""


def html_page(figures: PageFigures) -> str:
    """Returns the page as HTML text."""
    return _rendered(figures, page_data(figures, PAGE_BINS), is_page=True)


def write_page(figures: PageFigures, path: str | os.PathLike[str]) -> None:
    """Write the page to a file; raises OSError if it cannot be written."""
    write_atomically(Path(path), html_page(figures))


def notebook_html(figures: PageFigures) -> str:
    """Returns a picture and a short table as an HTML fragment: static, without script, legible on light and dark grounds."""
    return _rendered(figures, page_data(figures, NOTEBOOK_BINS), is_page=False)


def _rendered(figures: PageFigures, data: dict[str, Any], *, is_page: bool) -> str:
    limits = (("budget", figures.budget_bytes), ("lowest reachable peak", figures.floor_bytes))
    amounts = [(name, nbytes, "plan" if name == PREDICTED else "") for name, nbytes in figures.peaks]
    amounts += [(name, nbytes, "limit") for name, nbytes in limits if nbytes is not None]
    return _template().render(figures=figures, data=data, amounts=amounts, is_page=is_page)


@cache
def _template() -> jinja2.Template:
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {"bytes": format_bytes, "time": format_time}
    environment.globals["script"] = (here / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html.jinja")


# -- the data of the charts ----------------------------------------------------------------------------------------------


def page_data(figures: PageFigures, most_bins: int) -> dict[str, Any]:
    """Returns the data that template and script draw, as JSON values; `step` and `frontier` are None if they are unknown."""
    step = None if figures.step is None else binned(figures.step, most_bins)
    return {
        "colours": COLOURS,
        "step": None if step is None else _step_data(figures, step),
        "frontier": _frontier_data(figures) if figures.frontier else None,
    }


def _step_data(figures: PageFigures, step: StepFigures) -> dict[str, Any]:
    tops = list(accumulate(step.areas.values(), lambda below, area: tuple(map(add, below, area))))
    live = tops[-1]
    highest = max([*live, *(step.other.live_bytes if step.other is not None else ())])
    lines = {"budget": figures.budget_bytes, "floor": figures.floor_bytes}
    shown = {name: nbytes for name, nbytes in lines.items() if nbytes and nbytes <= 1.5 * highest}
    peak = live.index(max(live))
    strings: dict[str, int] = {}
    return {
        "names": step.columns,
        "num_forward": step.num_forward,
        "areas": step.areas,
        "tops": dict(zip(step.areas, tops, strict=True)),
        "live_bytes": live,
        "peak": peak,
        "moments": sorted({round(k * (len(live) - 1) / (MOMENTS - 1)) for k in range(MOMENTS)} | {peak}),
        "other": None if step.other is None else asdict(step.other),
        "lines": shown,
        "axis": byte_axis(max([highest, *shown.values()])),
        "tensors": [_tensor_data(t, strings) for t in largest(step.tensors, MOST_KEPT)],
        "strings": list(strings),
    }


def _tensor_data(tensor: Tensor, strings: dict[str, int]) -> list[int | str]:
    """Returns a tensor for the script; each text but the kind's is its index in `strings`, which gets new texts."""
    type_text = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]" if tensor.dtype else ""
    source = "/".join(tensor.source_line.replace("\\", "/").rsplit("/", 2)[-2:])
    texts = (tensor.name, type_text, tensor.fate, tensor.module_path, source)
    return [tensor.nbytes, tensor.kind, tensor.begin, tensor.end, *(strings.setdefault(s, len(strings)) for s in texts)]


def _frontier_data(figures: PageFigures) -> dict[str, Any]:
    points = [{**asdict(p), "percent": 100 * figures.base.share_of(p.time_ns)} for p in figures.frontier]
    return {"points": points, "axis": byte_axis(max(p.peak_bytes for p in figures.frontier))}


def binned(step: StepFigures, most: int) -> StepFigures:
    """Returns the step with at most about `most` columns; none of them lies on both sides of the forward's end.

    Each of the new columns has the figures of the highest column that it replaces, but all of their time, and the most bytes of
    the other plan.  A tensor that is live in none of these highest columns is left out.
    """
    live = step.live_bytes
    size = -(-len(live) // most)
    bounds = [*range(0, step.num_forward, size), *range(step.num_forward, len(live), size), len(live)]
    spans = list(pairwise(bounds))
    columns = [max(range(a, b), key=live.__getitem__) for a, b in spans]
    tensors = (
        replace(t, begin=bisect_left(columns, t.begin), end=bisect_right(columns, t.end) - 1) for t in step.tensors
    )
    other = step.other
    return StepFigures(
        columns=tuple(step.columns[column] for column in columns),
        num_forward=sum(a < step.num_forward for a, _ in spans),
        areas={kind: tuple(area[column] for column in columns) for kind, area in step.areas.items()},
        tensors=tuple(t for t in tensors if t.begin <= t.end),
        times_ns=tuple(sum(step.times_ns[a:b]) for a, b in spans),
        other=other and Curve(other.label, tuple(max(other.live_bytes[a:b]) for a, b in spans)),
    )


def largest(tensors: Sequence[Tensor], most: int) -> Sequence[Tensor]:
    """Returns at most `most` tensors, those with the largest product of bytes and live columns, in their order."""
    if len(tensors) <= most:
        return tensors
    order = sorted(range(len(tensors)), key=lambda k: -tensors[k].nbytes * (tensors[k].end - tensors[k].begin + 1))
    return [tensors[k] for k in sorted(order[:most])]


def byte_axis(most_bytes: int) -> dict[str, Any]:
    """Returns an axis from 0 to `top_bytes`, which is above `most_bytes`, and its `ticks`: amounts in bytes with their texts.

    The ticks are at most six multiples of 1, 2 or 5 times a power of 10, in one unit, from 0 on.
    """
    top_bytes = max(most_bytes + 1, int(most_bytes * HEADROOM))
    units = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}
    name, unit = next((name, unit) for name, unit in units.items() if top_bytes >= unit)
    steps = (factor * 10**power for power in range(5) for factor in (1, 2, 5))
    step = next(step for step in steps if top_bytes < MOST_TICKS * step * unit)
    numbers = range(0, top_bytes // unit + 1, step)
    return {"top_bytes": top_bytes, "ticks": [(k * unit, f"{k} {name}" if k else "0") for k in numbers]}
