"""The stored results of each benchmark: their rows, and how these become a table, a summary and a list of misses."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import (
    conv_gradients,
    cuda_codegen,
    emitted,
    first_step,
    floor,
    forecast_facts,
    gap,
    gpu_peaks,
    inputs,
    max_speed,
    offload,
    planning_time,
    promise,
    scale,
    search_share,
    slices,
    stacks,
    step_time,
    together,
    workspaces,
)
from benchmarks.common.result_rows import Row
from benchmarks.common.timing import RatioInterval
from benchmarks.contest import frontier
from benchmarks.pages.tables import Table, markdown_table
from benchmarks.zoo import gaps
from benchmarks.zoo import summary as zoo_summary
from benchmarks.zoo.rows import ZooRow

RESULTS = Path(__file__).parents[1] / "results"
CONTESTS, ESTIMATES = "gpu_h200", "plan_estimates.txt"
FROZEN = frozenset({"predicted_time_cpu.json", "published.json"})
"""Rows of benchmarks that are no longer here; their pages say which commit has them."""
NOT_SHOWN = frozenset(
    {"digest.json", "digest_problems.json.gz", "memory_over_a_step_cpu.json", "promise_rivals_cpu.json"}
)
"""Compared by `benchmarks.digest`, drawn by `benchmarks.picture`, merged into another file."""

Miss = tuple[str, str, str]
"""Model, setting, and the reason why that row falls short."""


def _verdicts(name: Callable[[Any], tuple[str, str]]) -> Callable[[Sequence[Any]], Iterator[Miss]]:
    """Returns a function that finds the misses of rows with a `verdict`; `name` returns a row's model and setting."""
    return lambda rows: (
        (*name(row), row.verdict.removeprefix("miss: ")) for row in rows if row.verdict.startswith("miss")
    )


@dataclass(frozen=True)
class Report:
    """One benchmark's rows as text.

    Attributes:
        row: Type of the rows.
        table: Makes titles and cells.
        summary: Makes text to show below the table; empty for none.
        misses: Finds the rows that fall short.
    """

    row: Callable[..., Any]
    table: Callable[[Sequence[Any]], Table]
    summary: Callable[[Sequence[Any]], object] = lambda rows: ""
    misses: Callable[[Sequence[Any]], Iterable[Miss]] = lambda rows: ()


# -- what single benchmarks have of their own -------------------------------------------------------------------------


def _promise_misses(rows: Sequence[Row]) -> Iterator[Miss]:
    for row in promise.summarise(rows).misses:
        mine = [each for each in rows if each.model == row.model]
        yield row.model, row.setting, promise.verdict(row, mine).removeprefix("miss: ")


def code_table(rows: Sequence[Row]) -> Table:
    """Predicted peak > that of the emitted code, one line a model, and the largest difference of its rows."""
    lines = []
    for name in dict.fromkeys(row.model for row in rows):
        plain, *ours = (row for row in rows if row.model == name)
        excess = [row.scheduled_peak_bytes / row.predicted_peak_bytes - 1 for row in ours if row.scheduled_peak_bytes]
        cells = {row.setting: _predicted_and_code(row) for row in ours}
        settings = [cells.get(setting, "-") for setting in (*map(str, promise.FRACTIONS), "min")]
        worst = max(excess, key=abs, default=None)
        lines.append(
            [name, promise.mib(plain.scheduled_peak_bytes), *settings, "-" if worst is None else f"{worst:+.2%}"]
        )
    return ("model", "plain", *map(str, promise.FRACTIONS), "min", "code over predicted, worst"), lines


def _predicted_and_code(row: Row) -> str:
    if row.failure is not None or row.floor_bytes is not None:
        return "-" if row.failure is not None else "floor"
    return f"{promise.mib(row.predicted_peak_bytes)} > {promise.mib(row.scheduled_peak_bytes)}"


def _gap_summary(rows: Sequence[gap.GapRow]) -> str:
    kinds = dict.fromkeys(row.kind for row in rows)
    return "\n".join(f"{kind}: {gap.summary([row for row in rows if row.kind == kind])}" for kind in kinds)


def _gpu_misses(rows: Sequence[gpu_peaks.PeakRow]) -> Iterator[Miss]:
    for row in rows:
        name = row.model, f"{row.dtype} {row.setting}"
        if row.failure:
            yield *name, row.failure
        if row.is_over:
            yield *name, f"{(row.peak_bytes or 0) / (row.budget_bytes or 1) - 1:.1%} above the budget"
        if abs(row.error or 0.0) > gpu_peaks.WORST_ERROR:
            yield *name, f"prediction off by {row.error:+.1%}"


def _codegen_misses(rows: Sequence[cuda_codegen.CodegenRow]) -> Iterator[Miss]:
    for row in rows:
        if row.failure or (row.excess or 0.0) > cuda_codegen.WORST_EXCESS:
            reason = row.failure or f"first code {row.excess:+.1%} over its plan"
            yield row.model, f"{row.dtype} {row.setting}", reason


def _emitted_misses(rows: Sequence[emitted.EmittedRow]) -> Iterator[Miss]:
    for row in rows:
        if row.failure:
            yield row.model, row.setting, row.failure
        elif row.guarded and row.budget_bytes is not None and (row.peak_bytes or 0) > row.budget_bytes:
            yield row.model, row.setting, f"{(row.peak_bytes or 0) / row.budget_bytes - 1:.1%} above the budget"


def _forecast_misses(rows: Sequence[forecast_facts.ForecastRow]) -> Iterator[Miss]:
    for row in rows:
        name = row.model, f"{row.dtype} {row.budget}"
        if not row.is_exact:
            yield *name, row.why or "the forecast is not that of the code"
        if abs(row.estimate_error or 0.0) > forecast_facts.WORST_ESTIMATE:
            yield *name, f"estimate off by {row.estimate_error:+.1%}"


def _gradient_misses(rows: Sequence[conv_gradients.GradientRow]) -> Iterator[Miss]:
    lines = (line for line in conv_gradients.verdicts(rows) if line.startswith("miss: "))
    for line in lines:
        name, _, reason = line.removeprefix("miss: ").partition(": ")
        model, _, setting = name.partition(", ")
        yield model, setting, reason


def _input_misses(rows: Sequence[inputs.InputsRow]) -> Iterator[Miss]:
    for line in inputs.misses(rows):
        name, _, reason = line.partition(": ")
        model, _, share = name.partition(" at ")
        yield model, share, reason


def _zoo_misses(rows: Sequence[ZooRow]) -> Iterator[Miss]:
    for row in rows:
        if reason := zoo_summary.miss(row, rows):
            yield row.model, row.setting if row.dtype == "float32" else f"{row.dtype} {row.setting}", reason


PROMISE = Report(Row, promise.model_table, promise.summarise, _promise_misses)
CODE_ONLY = Report(Row, code_table, promise.summarise, _promise_misses)
GRADIENTS = Report(conv_gradients.GradientRow, conv_gradients.medians, misses=_gradient_misses)
ZOO = Report(ZooRow, zoo_summary.model_table, zoo_summary.text_of, _zoo_misses)

REPORTS: dict[str, Report] = {
    "gpu_peaks_h200.json": Report(
        gpu_peaks.PeakRow,
        lambda rows: (gpu_peaks.TITLES[:-2], [gpu_peaks.cells(row)[:-2] for row in rows]),
        gpu_peaks.summary,
        _gpu_misses,
    ),
    "promise_cpu.json": PROMISE,
    "promise_bfloat16_cpu.json": PROMISE,
    "promise_autocast_cpu.json": PROMISE,
    **{
        f"promise_{dtype}_code_torch{version}_cpu.json": CODE_ONLY
        for version in ("2.11", "2.15")
        for dtype in ("float32", "bfloat16")
    },
    "floor_cpu.json": Report(floor.FloorRow, floor.table, misses=_verdicts(lambda row: (row.model, ""))),
    "slices_cpu.json": Report(slices.SliceRow, slices.table, misses=_verdicts(lambda row: (row.case, ""))),
    "offload_cpu.json": Report(
        offload.OffloadRow,
        offload.table,
        offload.summary,
        _verdicts(lambda row: (row.model, f"{row.fraction:g}")),
    ),
    "stacks_cpu.json": Report(stacks.StackRow, stacks.table, misses=_verdicts(lambda row: (row.tool, ""))),
    "together_cpu.json": Report(
        together.StepRow, together.table, misses=_verdicts(lambda row: (row.case, row.setting))
    ),
    "max_speed_cpu.json": Report(max_speed.MaxRow, max_speed.table, misses=_verdicts(lambda row: (row.model, ""))),
    "step_time_cpu.json": Report(
        step_time.StepTimeRow, step_time.table, misses=_verdicts(lambda row: (row.model, row.budget))
    ),
    "gap_cpu.json": Report(
        gap.GapRow,
        lambda rows: gap.gap_table([row for row in rows if row.kind != "exact"]),
        _gap_summary,
        _verdicts(lambda row: (row.model, f"{row.budget_bytes / row.fastest_peak_bytes:.1f}")),
    ),
    "gap_zoo_cpu.json": Report(
        gaps.PartsRow, gaps.table, gaps.summary, _verdicts(lambda row: (row.model, row.setting))
    ),
    "first_step_cpu.json": Report(first_step.FirstStepRow, first_step.table, first_step.summary),
    "planning_time_cpu.json": Report(planning_time.PlanningTimeRow, planning_time.table, planning_time.summary),
    "search_share_cpu.json": Report(
        search_share.ShareRow,
        search_share.table,
        search_share.summary,
        _verdicts(lambda row: (row.model, row.setting)),
    ),
    "scale_cpu.json": Report(scale.ScaleRow, scale.scale_table),
    "cuda_codegen.json": Report(cuda_codegen.CodegenRow, cuda_codegen.table, cuda_codegen.summary, _codegen_misses),
    "emitted.json": Report(emitted.EmittedRow, emitted.table, misses=_emitted_misses),
    "emitted_slices.json": Report(emitted.EmittedRow, emitted.table, misses=_emitted_misses),
    "forecast_facts.json": Report(
        forecast_facts.ForecastRow, forecast_facts.table, forecast_facts.summary, _forecast_misses
    ),
    "workspaces_cpu.json": Report(
        workspaces.WorkspaceRow,
        workspaces.table,
        workspaces.summary,
        lambda rows: ((row.operator, "", "no plan counts its bytes") for row in rows if row.is_missed),
    ),
    "inputs_cpu.json": Report(inputs.InputsRow, lambda rows: (inputs.TITLES, inputs.table(rows)), misses=_input_misses),
    "conv_gradients_cpu.json": GRADIENTS,
    "conv_gradients_inductor_cpu.json": GRADIENTS,
    "zoo_after.json": ZOO,
    "zoo_before.json": ZOO,
}


# -- files as text ----------------------------------------------------------------------------------------------------


def names() -> set[str]:
    """Names of all stored results that are shown on pages."""
    found = {path.name for path in RESULTS.iterdir()} - NOT_SHOWN - FROZEN - {CONTESTS}
    return found | {f"{CONTESTS}/{name}" for name in contests()}


def text(name: str) -> str:
    """Returns what a page shows of a stored result.

    Raises:
        KeyError: The result is of a benchmark that has no entry in `REPORTS`.
    """
    if name == ESTIMATES:
        return "\n\n".join(_block(part) for part in _commands((RESULTS / ESTIMATES).read_text()))
    if name.startswith(CONTESTS):
        return _contest_text(name.partition("/")[2])
    report, rows = REPORTS[name], rows_of(name)
    parts = [f"{place(name)}; `{name}`", markdown_table(report.table(rows))]
    if report.summary(rows):
        parts.append(summary(name))
    return "\n\n".join(parts)


def summary(name: str) -> str:
    """The summary of a file's rows, as a block of text."""
    return _block(str(REPORTS[name].summary(rows_of(name))))


def _block(lines: str) -> str:
    return f"```text\n{lines.rstrip()}\n```"


def _commands(printed: str) -> Iterator[str]:
    """A part for each command, which begins with a dollar sign."""
    for part in printed.split("\n$ "):
        yield part if part.startswith("$ ") else f"$ {part}"


@cache
def stored(name: str) -> Mapping[str, Any]:
    """The document of a file of the results."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def place(name: str) -> str:
    """Machine, threads, version of torch and day of a file's rows."""
    header = stored(name)["header"]
    device = header["device"].partition("(")[2].rstrip(")") or header["device"]
    threads = f"{header['threads']} thread" + "s" * (header["threads"] != "1")
    return f"{device}, {threads}, torch {header['torch']}, {header['date'].partition(' ')[0]}"


def rows_of(name: str) -> list[Any]:
    """The rows of a file, as values of their benchmark's type."""
    kind = REPORTS[name].row
    make = getattr(kind, "of", lambda fields: kind(**fields))
    return [make(_timed(fields)) for fields in stored(name)["rows"]]


def _timed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row with its measured ratios as values of their type."""
    return {k: RatioInterval(**v) if isinstance(v, dict) and "pairs" in v else v for k, v in fields.items()}


# -- contests on a GPU ------------------------------------------------------------------------------------------------


@cache
def contests() -> dict[str, list[frontier.Point]]:
    """The points of each model of `benchmarks.gpu`, by the name of their file."""
    documents = {path.name: stored(f"{CONTESTS}/{path.name}") for path in sorted((RESULTS / CONTESTS).glob("*.json"))}
    return {
        name: [frontier.Point(**fields) for fields in document["points"]]
        for name, document in documents.items()
        if "points" in document
    }


def _contest_text(file: str) -> str:
    points = contests()[file]
    cells = [frontier.cells(point, points, is_timed=True)[:-2] for point in points]
    lines, _ = frontier.summary(points, is_timed=True)
    name = f"{CONTESTS}/{file}"
    table = markdown_table((frontier.TITLES[:-2], cells))
    return "\n\n".join([f"{place(name)}; `{name}`", table, _block("\n".join(lines))])


def misses() -> Iterator[tuple[str, Miss]]:
    """Each row that falls short, with its file, of all stored results but `zoo_before.json`, which others replace."""
    for name, report in REPORTS.items():
        if name != "zoo_before.json":
            yield from ((name, miss) for miss in report.misses(rows_of(name)))
    for file, points in contests().items():
        name, model = f"{CONTESTS}/{file}", file.removesuffix(".json")
        for point in points:
            yield from ((name, (model, point.name, why)) for why in frontier.shortfalls(point, points, is_timed=True))
        for rival, best, ratio in frontier.rivals_beaten(points):
            limit = frontier.limit_of(rival)
            if ratio > limit:
                yield name, (model, best.name, f"{ratio:.3f} of the time of {rival.name}, above {limit:.3f}")
