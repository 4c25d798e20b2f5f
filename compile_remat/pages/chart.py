"""Draws the chart of live bytes over a step: columns merged into visible bins, SVG paths, and placed labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from compile_remat._util.units import format_bytes
from compile_remat.pages.figures import Kind, PageFigures, StepFigures
from compile_remat.pages.palette import COLOURS
from compile_remat.pages.scale import ByteScale, byte_scale

HEIGHT = 1000
"""Units of the drawing from the top to 0 bytes; horizontally, a unit is a bin."""

MOST_BINS = 700
LABEL_LEAST = 0.075
"""Least height, as a share of the chart, at which an area can hold its name."""


@dataclass(frozen=True)
class Bins:
    """The columns of a step; if there are too many to see, several of them merged into each bin.

    Attributes:
        columns: The column that represents each bin: the one with the most live bytes.
        num_forward: Number of bins that are the forward's.
        areas: Live bytes of each kind in the representing columns.
        other: The most live bytes of the other plan in each bin; empty without another plan.
    """

    columns: tuple[int, ...]
    num_forward: int
    areas: dict[Kind, tuple[int, ...]]
    other: tuple[int, ...]

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Live bytes of the plan in each bin."""
        return tuple(map(sum, zip(*self.areas.values(), strict=True)))


def binned(step: StepFigures, most: int = MOST_BINS) -> Bins:
    """Returns at most about `most` bins; each shows its highest column, and none lies on both sides of the forward's end."""
    live = step.live_bytes
    size = -(-len(live) // most)
    bounds = [
        *range(0, step.num_forward, size),
        *range(step.num_forward, len(live), size),
        len(live),
    ]
    spans = list(pairwise(bounds))
    columns = tuple(max(range(a, b), key=lambda column: live[column]) for a, b in spans)
    return Bins(
        columns,
        sum(a < step.num_forward for a, _ in spans),
        {kind: tuple(area[c] for c in columns) for kind, area in step.areas.items()},
        () if step.other is None else tuple(max(step.other.live_bytes[a:b]) for a, b in spans),
    )


@dataclass(frozen=True)
class Label:
    """A text in the chart.

    Attributes:
        x, y: Position of the text as shares of width and height, from the top left.
        side: The part of the text at that position, "start", "middle" or "end", as SVG's ``text-anchor``.
        is_below: True if the text hangs below the position; False if it stands above.
        role: The labelled object: "plan", "other", "budget", "floor", or "area".
    """

    text: str
    x: float
    y: float
    side: str
    role: str
    is_below: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawing without texts, of `width` by `HEIGHT` units, which may be stretched over any rectangle, and its labels.

    Attributes:
        shapes: SVG elements.
    """

    width: int
    bins: Bins
    scale: ByteScale
    shapes: str
    labels: tuple[Label, ...]


def drawing(figures: PageFigures, step: StepFigures) -> Chart:
    """Returns the chart of a step."""
    bins = binned(step)
    lines = [nbytes for nbytes in (figures.budget_bytes, figures.floor_bytes) if nbytes]
    peak = max(bins.live_bytes)
    highest = max([peak, *bins.other])
    scale = byte_scale(max([highest, *(nbytes for nbytes in lines if nbytes <= 1.5 * highest)]))
    shown = [
        nbytes if nbytes and nbytes <= scale.top_bytes else None
        for nbytes in (figures.budget_bytes, figures.floor_bytes)
    ]
    width = len(bins.columns)
    shapes = [_grid(scale, width), *_areas(bins, scale), _divider(bins)]
    if bins.other:
        shapes.append(_line("other", _outline(bins.other, scale), 'stroke-width="1.25"'))
    for name, dashes, nbytes in zip(("budget", "floor"), ("7 4", "1.5 3"), shown, strict=True):
        if nbytes is not None:
            shapes.append(
                _line(name, f"M0 {_y(nbytes, scale)}H{width}", f'stroke-width="1.5" stroke-dasharray="{dashes}"')
            )
    peaks = _peak_labels(bins, scale, step)
    labels = [*peaks, *_line_labels(shown, scale, peaks[0]), *_area_labels(bins, scale)]
    return Chart(width, bins, scale, "".join(shapes), tuple(labels))


def _line(class_: str, path: str, style: str) -> str:
    """Returns a line whose thickness does not change when the drawing is stretched."""
    return (
        f'<path class="{class_}" fill="none" stroke="currentColor" {style} '
        f'vector-effect="non-scaling-stroke" d="{path}"/>'
    )


def _y(nbytes: float, scale: ByteScale) -> int:
    return round(HEIGHT * (1 - scale.share(nbytes)))


def _grid(scale: ByteScale, width: int) -> str:
    lines = "".join(f"M0 {_y(nbytes, scale)}H{width}" for nbytes, _ in scale.ticks)
    return _line("grid", lines, 'stroke-opacity=".14"')


def _divider(bins: Bins) -> str:
    return _line("divider", f"M{bins.num_forward} 0V{HEIGHT}", 'stroke-opacity=".45"')


def _areas(bins: Bins, scale: ByteScale) -> list[str]:
    below = [0] * len(bins.columns)
    found = []
    for kind, area in bins.areas.items():
        above = [low + nbytes for low, nbytes in zip(below, area, strict=True)]
        if any(area):
            upper = _outline(above, scale)
            lower = _outline(below[::-1], scale, backwards=True)
            found.append(f'<path class="{kind}" fill="{COLOURS[kind]}" d="{upper}{lower}Z"/>')
        below = above
    return found


def _outline(levels: Sequence[int], scale: ByteScale, *, backwards: bool = False) -> str:
    """Returns an SVG path of steps from left to right; with `backwards`, of reversed levels, its continuation to the left."""
    parts = []
    x, width = 0, len(levels)
    for y, run in groupby(_y(nbytes, scale) for nbytes in levels):
        x += sum(1 for _ in run)
        parts.append(f"V{y}H{width - x if backwards else x}")
    if not backwards:
        parts[0] = parts[0].replace("V", "M0 ", 1)
    return "".join(parts)


# -- texts --------------------------------------------------------------------------------------------------------------


def _peak_labels(bins: Bins, scale: ByteScale, step: StepFigures) -> list[Label]:
    """Returns the label at the plan's peak, and one at the other plan's peak if that is more than 2 % higher."""
    found = [_peak_label("peak", "plan", bins.live_bytes, scale)]
    if step.other is not None:
        other = _peak_label(step.other.label, "other", bins.other, scale)
        if max(bins.other) > max(bins.live_bytes) * 1.02:
            found.append(other)
    return found


def _peak_label(name: str, role: str, levels: Sequence[int], scale: ByteScale) -> Label:
    most = max(levels)
    x = (levels.index(most) + 0.5) / len(levels)
    side = "end" if x > 0.6 else "start"
    return Label(f"{name} {format_bytes(most)}", x, 1 - scale.share(most), side, role)


NEAR = 0.07
"""Labels closer than this share of the height would overlap."""


def _line_labels(shown: Sequence[int | None], scale: ByteScale, peak: Label) -> list[Label]:
    """Returns the labels of budget and floor, at the side farther from the peak.

    The floor's label is below its line; the budget's is above, or below if the peak's label is near and the floor's is not.
    """
    x, side = (0.992, "end") if peak.x < 0.5 else (0.008, "start")
    budget_y, floor_y = (None if nbytes is None else 1 - scale.share(nbytes) for nbytes in shown)
    found, (budget, floor) = [], shown
    if budget is not None and budget_y is not None:
        is_below = abs(peak.y - budget_y) < NEAR and (floor_y is None or floor_y - budget_y > NEAR)
        found.append(Label(f"budget {format_bytes(budget)}", x, budget_y, side, "budget", is_below))
    if floor is not None and floor_y is not None:
        found.append(Label(f"floor {format_bytes(floor)}", x, floor_y, side, "floor", is_below=True))
    return found


def _area_labels(bins: Bins, scale: ByteScale) -> list[Label]:
    """Returns the name of each kind, in the middle of the widest part of its area that is high enough."""
    found = []
    below = [0] * len(bins.columns)
    for kind, area in bins.areas.items():
        high = [scale.share(nbytes) >= LABEL_LEAST for nbytes in area]
        place = _widest(high)
        if place is not None and place[1] - place[0] >= 0.12 * len(area):
            middle = (place[0] + place[1]) // 2
            y = 1 - scale.share(below[middle] + area[middle] / 2)
            found.append(Label(kind.value, (place[0] + place[1]) / 2 / len(area), y, "middle", "area"))
        below = [low + nbytes for low, nbytes in zip(below, area, strict=True)]
    return found


def _widest(flags: Sequence[bool]) -> tuple[int, int] | None:
    found, begin = None, 0
    for flag, run in groupby(flags):
        end = begin + sum(1 for _ in run)
        if flag and (found is None or end - begin > found[1] - found[0]):
            found = begin, end
        begin = end
    return found
