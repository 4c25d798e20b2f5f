"""Renders `PageFigures` as an HTML page, one file without network access, or as a fragment for notebooks.

The template ``page.html.jinja`` draws both, without a script.  The script ``page.js`` shows the tensors of one moment, copies
budgets and folds modules.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import accumulate, pairwise
from operator import add
from pathlib import Path
from typing import Any

import jinja2

from compile_remat._util.atomic_write import write_atomically
from compile_remat._util.units import GIB, KIB, MIB, TIB, exact_size, format_bytes, format_time
from compile_remat.pages.figures import (
    BEYOND,
    COLOURS,
    HATCHES,
    PLAIN,
    PREDICTED,
    Curve,
    ModuleRow,
    PageFigures,
    StepFigures,
    Tensor,
)

PAGE_BINS, NOTEBOOK_BINS = 700, 340
"""Columns of a chart, at most: more could not be told apart."""

MOST_KEPT = 4000
"""Tensors on a page, at most: the smallest of more are counted, not listed."""

MOMENTS = 24
"""Evenly spaced moments in the table of live bytes; the peak is one more."""

MOST_TICKS, HEADROOM = 6, 1.12
"""Ticks of an axis, at most, and its end as a multiple of the highest amount, which leaves space for that amount's label."""

HEIGHT = 1000
"""Height of a drawing in its own units; it is stretched over its box."""

NUMBERS = re.compile(r"(?:^|\.)[\d,-]+(?=\.|$)")
"""Matches a part of a row's path that is numbers, as in ``layers.0-3,7.mlp``."""


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
    amounts = [(name, nbytes, "plan" if name == PREDICTED else "") for name, nbytes in figures.peaks]
    most = max((nbytes for _, nbytes, _ in amounts), default=0)
    drawn = [n for n in figures.limits.values() if n <= BEYOND * most or not most]
    amounts += [(name, n, "limit" if n in drawn else "limit beyond") for name, n in figures.limits.items()]
    return _template().render(
        figures=figures,
        data=data,
        amounts=amounts,
        most=max([1, most, *drawn]),
        is_page=is_page,
        uid="" if is_page else f"{zlib.crc32(repr(data).encode()):08x}",
    )


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
    environment.filters |= {"bytes": format_bytes, "time": format_time, "outline": outline}
    environment.globals |= {"colours": COLOURS, "hatches": HATCHES, "plain": PLAIN, "height": HEIGHT}
    environment.globals["script"] = (here / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html.jinja")


# -- the data of the charts ----------------------------------------------------------------------------------------------


def page_data(figures: PageFigures, most_bins: int) -> dict[str, Any]:
    """Returns the data that the template draws, as JSON values; `step` and `frontier` are None if they are unknown.

    `script` is the part of `step` that the script reads.
    """
    step = None if figures.step is None else _step_data(figures, binned(figures.step, most_bins))
    read = ("names", "num_forward", "areas", "live_bytes", "peak", "other", "tensors", "strings")
    return {
        "step": step,
        "script": None if step is None else {name: step[name] for name in read},
        "frontier": _frontier_data(figures) if figures.frontier else None,
        "modules": module_groups(figures.modules),
    }


def _step_data(figures: PageFigures, step: StepFigures) -> dict[str, Any]:
    tops = list(accumulate(step.areas.values(), lambda below, area: tuple(map(add, below, area))))
    live = tops[-1]
    highest = max([*live, *(step.other.live_bytes if step.other is not None else ())])
    lines = {name: nbytes for name, nbytes in figures.limits.items() if nbytes}
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
        "lines": lines,
        "axis": byte_axis(max([highest, *(nbytes for nbytes in lines.values() if nbytes <= BEYOND * highest)])),
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
    """Returns the points of the frontier by rising peak, and plain torch.compile's (None if unknown), placed from the top left."""
    base, plain_bytes = figures.base, dict(figures.peaks).get(PLAIN)
    across = byte_axis(max([*(p.peak_bytes for p in figures.frontier), plain_bytes or 0]))
    up = percent_axis([100 * base.share_of(p.time_ns) for p in figures.frontier])

    def placed(peak_bytes: int, time_ns: int) -> dict[str, Any]:
        percent = 100 * base.share_of(time_ns)
        x, y = peak_bytes / across["top_bytes"], 1 - (percent - up["bottom"]) / up["height"]
        return {"peak_bytes": peak_bytes, "time_ns": time_ns, "percent": percent, "x": x, "y": y}

    is_known = plain_bytes is not None and base.name == PLAIN
    points = sorted(figures.frontier, key=lambda p: p.peak_bytes)
    return {
        "points": [
            {**placed(p.peak_bytes, p.time_ns), "is_chosen": p.is_chosen, "option": budget_option(p.peak_bytes)}
            for p in points
            if not p.moves_nothing
        ],
        "without": [placed(p.peak_bytes, p.time_ns) for p in points if p.moves_nothing],
        "plain": placed(plain_bytes or 0, base.time_ns) if is_known else None,
        "across": [(nbytes / across["top_bytes"], text) for nbytes, text in across["ticks"]],
        "up": [(1 - (percent - up["bottom"]) / up["height"], text) for percent, text in up["ticks"]],
    }


def budget_option(nbytes: int) -> str:
    """Returns an option with a budget that a plan of this peak keeps: ``"memory_budget": "276MiB"``, or in KiB below 16 MiB."""
    unit = MIB if nbytes >= 16 * MIB else KIB
    return f'"memory_budget": "{exact_size(-(-nbytes // unit) * unit)}"'


def module_groups(rows: Sequence[ModuleRow]) -> list[tuple[str, list[ModuleRow]]]:
    """Groups rows by their paths before the first number (``model.layers``), in the order of each group's first row.

    A path that begins with a number is in the group of the paths that differ in this number alone: ``*.mlp``.
    """
    groups: dict[str, list[ModuleRow]] = {}
    for row in rows:
        before, *after = NUMBERS.split(row.path, maxsplit=1)
        groups.setdefault(before or "*".join(["", *after]), []).append(row)
    return list(groups.items())


def outline(levels: Iterable[int], top_bytes: int) -> str:
    """Returns an SVG path of steps from left to right, a unit for each level in bytes; `top_bytes` is at the drawing's top."""
    places = [round(HEIGHT * (1 - nbytes / top_bytes)) for nbytes in levels]
    parts = [f"M0 {places[0]}"]
    for column, (place, following) in enumerate(pairwise(places), start=1):
        if following != place:
            parts.append(f"H{column}V{following}")
    return "".join([*parts, f"H{len(places)}"])


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


def percent_axis(percents: Sequence[float]) -> dict[str, Any]:
    """Returns an axis for per cents and 0: its `bottom`, its `height`, and at most six `ticks` with their texts."""
    least, most = min(0.0, *percents), max(0.0, *percents)
    span = max(most - least, 0.01)
    step = next(f * 10**power for power in range(-2, 9) for f in (1, 2, 5) if span / (f * 10**power) <= MOST_TICKS - 2)
    bottom = least - 0.1 * span * (least < 0)
    digits = 0 if step >= 1 else 1 if step >= 0.1 else 2
    numbers = range(math.ceil(bottom / step), math.floor((bottom + 1.35 * span) / step) + 1)
    ticks = [(k * step, f"{k * step:.{digits}f} %") for k in numbers]
    return {"bottom": bottom, "height": 1.35 * span, "ticks": ticks}
