"""Measured points of one model, memory against time: their file, their table, what they show, and their picture."""

import importlib.util
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import ascii_table, mib, ms, percent
from compile_remat._util.atomic_write import write_atomically

SCHEMA = 1
PEAK_LIMIT, MEDIAN_PEAK_LIMIT = 0.03, 0.01
TIME_LIMIT = 0.15
BOUND_LIMIT = 0.02
CHECKPOINT_LIMIT = 1 / 1.08
FRACTIONS = ("0.5", "0.3")
TITLES = (
    "run", "budget", "peak", "predicted", "scheduled", "error", "step ms", "predicted", "error", "extra", "predicted",
    "bound", "gradients", "wall s", "note",
)  # fmt: skip
FIGURES_OF_PLACE = ("device", "torch", "size", "options")
"""Parts of the header that must be the same for all points of a file."""


@dataclass(frozen=True)
class Point:
    """One way to train the model, measured. A figure is None if the way does not have it, or if it failed.

    Attributes:
        kind: plain (torch.compile), eager, checkpoint (every block, compiled), torch (its activation_memory_budget),
            remat, or exact (eager in float64, for its gradients alone).
        level_bytes: In use before the step: parameters, inputs, and what libraries keep.
        peak_bytes: The most in use during a step, above that level.
        requested_bytes: `peak_bytes` before the allocator rounds up.
        reserved_bytes: Device memory that the allocator reserves beyond `level_bytes`, gaps beside parameters included.
        predicted_reserved_bytes: The report's `reserved_peak_bytes`, which knows of no parameters.
        gradient_bytes: Bytes of the parameters' gradients, which the step leaves behind.
        step_ns: Median time of a step; `step_low_ns` and `step_high_ns` are its quartiles.
        visits_ns: Median time of the steps of each visit, where other points were timed between the visits.
        predicted_step_ns: The plan's estimate, recompute included.
        extra_ns: The part of `predicted_step_ns` beyond the fastest plan.
        bound_ns: Proven lower bound on `extra_ns`, under the plan's own cost model.
        gradient_difference: Norm of the difference from plain's gradients over the norm of these, of evenly spaced samples.
        worst_gradient: The largest such ratio of any single parameter.
        exact_difference: Norm of the difference from float64's gradients over the norm of these, of the same samples.
        floor_bytes: The lowest reachable peak, if no plan fits the budget.
        wall_s: Wall time of the whole point, compilation included.
    """

    kind: str
    setting: str
    budget_bytes: int | None = None
    level_bytes: int | None = None
    peak_bytes: int | None = None
    requested_bytes: int | None = None
    reserved_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    gradient_bytes: int | None = None
    step_ns: int | None = None
    step_low_ns: int | None = None
    step_high_ns: int | None = None
    steps: int | None = None
    visits_ns: list[int] | None = None
    predicted_peak_bytes: int | None = None
    scheduled_peak_bytes: int | None = None
    predicted_step_ns: int | None = None
    recompute_ns: int | None = None
    extra_ns: int | None = None
    bound_ns: int | None = None
    planning_s: float | None = None
    first_step_s: float | None = None
    gradient_difference: float | None = None
    worst_gradient: float | None = None
    exact_difference: float | None = None
    floor_bytes: int | None = None
    status: str | None = None
    message: str = ""
    failure: str | None = None
    wall_s: float = 0.0
    date: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.setting}"

    @property
    def peak_error(self) -> float | None:
        """Prediction minus measured peak, as a part of the measured peak."""
        return relative_error(self.predicted_peak_bytes, self.peak_bytes)

    @property
    def time_error(self) -> float | None:
        return relative_error(self.predicted_step_ns, self.step_ns)

    @property
    def bound_share(self) -> float | None:
        """The bound as a part of the estimated step without recompute."""
        return self._share(self.bound_ns)

    @property
    def extra_share(self) -> float | None:
        return self._share(self.extra_ns)

    def _share(self, time_ns: int | None) -> float | None:
        if time_ns is None or self.predicted_step_ns is None or self.extra_ns is None:
            return None
        return time_ns / max(1, self.predicted_step_ns - self.extra_ns)


def relative_error(predicted: int | None, measured: int | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


# -- the file ---------------------------------------------------------------------------------------------------------


def write(path: Path, model: str, head: dict[str, str], points: Sequence[Point]) -> None:
    """All points so far; a reader sees the old file or the new one."""
    document = {"schema": SCHEMA, "model": model, "header": head, "points": [asdict(point) for point in points]}
    write_atomically(path, json.dumps(document, indent=1) + "\n")


def read(path: Path, head: dict[str, str]) -> list[Point]:
    """Points that an earlier call finished; an empty list if there is no file.

    Raises:
        ValueError: The file is no such file, or its points were measured under other conditions.
    """
    if not path.exists():
        return []
    document: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no file of this version; choose another folder")
    for key in FIGURES_OF_PLACE:
        then = document["header"].get(key)
        if then != head[key]:
            raise ValueError(f"{path} was measured with {key} = {then}, this is {head[key]}; choose another folder")
    return [Point(**fields) for fields in document["points"]]


# -- what they show ---------------------------------------------------------------------------------------------------


def find(points: Sequence[Point], kind: str, setting: str) -> Point | None:
    return next((point for point in points if point.kind == kind and point.setting == setting), None)


def measured_extra(point: Point, points: Sequence[Point]) -> float | None:
    """Time beyond plain torch.compile, as a part of plain's."""
    plain = find(points, "plain", "default")
    return relative_error(point.step_ns, plain.step_ns) if plain is not None and point is not plain else None


def rivals_beaten(points: Sequence[Point]) -> Iterator[tuple[Point, Point, float]]:
    """Each rival below plain's peak, the fastest of our points with no higher peak, and our time over the rival's."""
    ours = [p for p in points if p.kind == "remat" and p.peak_bytes and p.step_ns]
    for rival in points:
        if rival.kind not in ("checkpoint", "torch") or not rival.peak_bytes or not rival.step_ns:
            continue
        near = [p for p in ours if (p.peak_bytes or 0) <= rival.peak_bytes]
        if near:
            best = min(near, key=lambda p: p.step_ns or 0)
            yield rival, best, (best.step_ns or 0) / rival.step_ns


def limit_of(rival: Point) -> float:
    """The most that our time may be over this rival's."""
    return CHECKPOINT_LIMIT if rival.kind == "checkpoint" else 1.0


def shortfalls(point: Point, points: Sequence[Point], *, is_timed: bool) -> list[str]:
    """Reasons why a point falls short; times count only if `is_timed`."""
    if point.failure is not None:
        return [point.failure.splitlines()[0]]
    if point.kind != "remat" or point.peak_bytes is None:
        return []
    found = []
    if point.budget_bytes is not None and point.peak_bytes > point.budget_bytes:
        found.append("above the budget")
    if abs(point.peak_error or 0.0) > PEAK_LIMIT:
        found.append(f"predicted peak off by more than {PEAK_LIMIT:.0%}")
    if is_timed:
        found += _time_shortfalls(point, points)
    return found


def _time_shortfalls(point: Point, points: Sequence[Point]) -> Iterator[str]:
    if abs(point.time_error or 0.0) > TIME_LIMIT:
        yield f"predicted time off by more than {TIME_LIMIT:.0%}"
    extra = measured_extra(point, points)
    if point.setting in FRACTIONS and extra is not None and extra - (point.bound_share or 0.0) > BOUND_LIMIT:
        yield f"extra time more than {BOUND_LIMIT:.0%} of the step above the bound"


def summary(points: Sequence[Point], *, is_timed: bool) -> tuple[list[str], int]:
    """Lines to print, and how many points fall short."""
    lines = []
    for name, errors in (
        ("predicted peak", [abs(p.peak_error) for p in points if p.peak_error is not None]),
        ("predicted step time", [abs(p.time_error) for p in points if p.time_error is not None]),
    ):
        if errors:
            lines.append(f"{name}: off by {statistics.median(errors):.2%} in the median, {max(errors):.2%} at worst")
    missed = sum(bool(shortfalls(point, points, is_timed=is_timed)) for point in points)
    for rival, best, ratio in rivals_beaten(points):
        limit = limit_of(rival)
        is_short = is_timed and ratio > limit
        missed += is_short
        lines.append(
            f"{rival.name} ({mib(rival.peak_bytes)} MiB, {ms(rival.step_ns)} ms): {best.name} takes {ratio:.3f} of its time "
            f"at {mib(best.peak_bytes)} MiB" + f"  miss: above {limit:.3f}" * is_short
        )
    lines.append(f"points that fall short: {missed}")
    return lines, missed


# -- the table and the picture ----------------------------------------------------------------------------------------


def table(points: Sequence[Point], *, is_timed: bool) -> str:
    return ascii_table(TITLES, [cells(point, points, is_timed=is_timed) for point in points])


def cells(point: Point, points: Sequence[Point], *, is_timed: bool) -> list[str]:
    """One row: bytes in MiB; extra times and the bound as parts of the step without recompute."""
    missed = "; ".join(shortfalls(point, points, is_timed=is_timed))
    notes = [f"miss: {missed}" if missed else "", point.message]
    if point.floor_bytes is not None:
        notes.insert(0, f"no plan fits: floor {mib(point.floor_bytes)}")
    return [
        point.name, mib(point.budget_bytes), mib(point.peak_bytes), mib(point.predicted_peak_bytes),
        mib(point.scheduled_peak_bytes), percent(point.peak_error), ms(point.step_ns), ms(point.predicted_step_ns),
        percent(point.time_error), percent(measured_extra(point, points)), percent(point.extra_share),
        percent(point.bound_share),
        "-" if point.gradient_difference is None else f"{point.gradient_difference:.1e}", f"{point.wall_s:.0f}",
        "; ".join(note for note in notes if note),
    ]  # fmt: skip


def quartiles(points: Sequence[Point]) -> Iterator[str]:
    """A line for each timed point: the quartiles of its steps."""
    for point in points:
        if point.step_ns is not None and point.step_low_ns is not None and point.step_high_ns is not None:
            times = (ms(time_ns) for time_ns in (point.step_low_ns, point.step_ns, point.step_high_ns))
            yield f"{point.name}: quartiles of {point.steps} steps {', '.join(times)} ms"


def draw(path: Path, head: Mapping[str, str], points: Mapping[str, Sequence[Point]]) -> bool:
    """Write the frontiers of each model as a PNG; False where matplotlib, an extra, is not installed, or nothing was measured."""
    shown = {
        model: found for model, each in points.items() if (found := [p for p in each if p.peak_bytes and p.step_ns])
    }
    if importlib.util.find_spec("matplotlib") is None or not shown:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5 * len(shown)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for (model, found), axes in zip(shown.items(), figure.subplots(len(shown), squeeze=False).flat, strict=True):
        _draw_one(axes, found)
        axes.set_title(f"{model}, {head['device']}, torch {head['torch']}, {head['date'][:10]}", fontsize=9)
    figure.savefig(path)
    return True


def _draw_one(axes: Any, points: Sequence[Point]) -> None:
    for kind in dict.fromkeys(point.kind for point in points):
        line = sorted((p.peak_bytes or 0, p.step_ns or 0, p.setting) for p in points if p.kind == kind)
        style = "-" if kind in ("torch", "remat") else ""
        axes.plot([x / (1 << 30) for x, _, _ in line], [y / 1e6 for _, y, _ in line], f"o{style}", label=kind)
        for x, y, text in line:
            axes.annotate(text, (x / (1 << 30), y / 1e6), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set_xlabel("peak of a step above the level before it, GiB")
    axes.set_ylabel("median step time, ms")
    axes.grid(alpha=0.3)
    axes.legend()
