"""Draws the same pictures with matplotlib, for papers.  Only this module imports matplotlib, and only to draw a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compile_remat._util.units import GIB, KIB, MIB, format_bytes
from compile_remat.errors import MissingExtraError
from compile_remat.pages.figures import BEYOND, COLOURS, BaseStep, FrontierPoint, Kind, PageFigures


def step_plot(figures: PageFigures) -> Any:
    """Returns live bytes over a step as a ``matplotlib.figure.Figure``; raises ValueError if they are unknown."""
    step = figures.known_step()
    figure, axes = _figure()
    other = () if step.other is None else step.other.live_bytes
    most = max([*step.live_bytes, *other])
    scale, unit = _unit(most)
    edges = range(len(step.columns) + 1)
    areas = {kind: [nbytes / scale for nbytes in (*area, area[-1])] for kind, area in step.areas.items() if any(area)}
    axes.stackplot(
        edges, *areas.values(), labels=list(areas), colors=[COLOURS[kind] for kind in areas], step="post", linewidth=0
    )
    if step.other is not None:
        axes.stairs([n / scale for n in other], edges, color="black", linewidth=1, label=step.other.label)
    for name, nbytes in figures.limits.items():
        if nbytes <= BEYOND * most:
            style = {"linestyle": "--" if name == "budget" else ":", "color": "black", "linewidth": 1}
            axes.axhline(nbytes / scale, label=f"{name} {format_bytes(nbytes)}", **style)
    axes.axvline(step.num_forward, color="black", linewidth=0.5, alpha=0.5)
    axes.set(
        xlabel="nodes in order of execution: forward, then backward", ylabel=f"live {unit}", xlim=(0, len(step.columns))
    )
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def frontier_plot(points: Sequence[FrontierPoint], base: BaseStep, title: str = "") -> Any:
    """Returns the extra time of a step against the region peak as a ``matplotlib.figure.Figure``."""
    figure, axes = _figure()
    scale, unit = _unit(max(p.peak_bytes for p in points))
    ordered = sorted((p for p in points if not p.moves_nothing), key=lambda p: p.peak_bytes)
    peaks, percents = [p.peak_bytes / scale for p in ordered], [100 * base.share_of(p.time_ns) for p in ordered]
    without = sorted((p.peak_bytes / scale, 100 * base.share_of(p.time_ns)) for p in points if p.moves_nothing)
    if without:
        style: dict[str, Any] = {"color": "black", "linewidth": 1, "linestyle": "--", "alpha": 0.6}
        axes.plot(*zip(*without, strict=True), label="nothing on the host", **style)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    axes.plot(peaks, percents, color="black", linewidth=1, marker="o", markersize=4, clip_on=False, zorder=3)
    for p, *place in zip(ordered, peaks, percents, strict=True):
        if p.is_chosen:
            text = f"this plan: {format_bytes(p.peak_bytes)}"
            axes.plot(*place, marker="o", markersize=8, color=COLOURS[Kind.SAVED], clip_on=False, zorder=4)
            axes.annotate(text, place, textcoords="offset points", xytext=(8, 6), fontsize=9)
    axes.set(xlabel=f"region peak, {unit}", ylabel=f"extra time, % of {base.name}", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=min(0.0, *percents))
    axes.grid(alpha=0.3)
    return figure


def _figure() -> tuple[Any, Any]:
    """Returns a new figure, which pyplot does not track, and its axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plot") from None
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _unit(most: int) -> tuple[int, str]:
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB") if most >= MIB else (KIB, "KiB")
