"""Frontiers with a source's points beside ours, as PNG and SVG; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.literature.rows import FrontierRow, Row
from benchmarks.literature.tables import frontiers
from compile_remat.pages.figures import BaseStep, FrontierPoint
from compile_remat.pages.plot import frontier_plot

DRAWN = {
    "published_resnet50": ("monet", "ResNet-50", "ResNet-50, batch 184, P100", "MONeT, as published"),
    "published_mobilenet_v2": ("monet", "MobileNetV2", "MobileNetV2, batch 272, P100", "MONeT, as published"),
    "published_unet": (
        "checkmate",
        "U-Net, batch 32",
        "U-Net in Checkmate's graph, batch 32",
        "Checkmate, as published: less than this",
    ),
}
"""File, source and network, title, and what the source's points are called."""

COLOURS = ("#9c4f96", "#d9730d", "#3a9d5d")
MARKERS = ("s", "^", "x")
HIGHEST = 1.6
"""Top of the vertical axis, over our slowest plan: points of rules that take longer lie outside."""

STEP_NS = 1_000_000_000
"""A step's time in the picture, whose axis has parts of it."""


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws the pictures whose rows exist; returns the files that were written."""
    found, written = frontiers(rows), []
    folder.mkdir(parents=True, exist_ok=True)
    for file, (source, network, title, theirs) in DRAWN.items():
        row = found.get((source, network))
        if row is None:
            continue
        figure = picture(row, title, theirs)
        for kind in ("png", "svg"):
            path = folder / f"{file}.{kind}"
            figure.savefig(path, dpi=160, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
    return written


def picture(row: FrontierRow, title: str, theirs: str) -> Any:
    """Our frontier as `compile-remat pareto` draws it, with the source's points and people's rules on it."""
    points = [FrontierPoint(int(nbytes), round((1 + extra) * STEP_NS)) for nbytes, extra in row.points]
    figure = frontier_plot(points, BaseStep(STEP_NS), title)
    axes = figure.axes[0]
    axes.lines[0].set_label("ours")
    scale = 1 << 30
    highest = HIGHEST * 100 * max(extra for _, extra in [*row.points, *row.published])
    marked = {theirs: row.published, **row.policies}
    for (name, each), colour, marker in zip(marked.items(), COLOURS, MARKERS, strict=False):
        if each:
            x, y = [nbytes / scale for nbytes, _ in each], [100 * extra for _, extra in each]
            axes.plot(x, y, color=colour, marker=marker, markersize=5, linestyle="none", label=name)
    axes.set_ylim(0, highest)
    axes.set(xlabel="peak, GiB", ylabel="extra time, % of the step")
    axes.legend(fontsize=8, frameon=False)
    return figure
