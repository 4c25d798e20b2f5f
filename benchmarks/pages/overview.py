"""Tables over several stored results, or of some rows of one: a line for each model on README.md and docs/results.md, the rows
that fall short, the tools of a guide.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import first_step, gap, gpu_peaks, promise, stacks
from benchmarks.common.harness import mib, ms, percent
from benchmarks.common.result_rows import Row
from benchmarks.contest import frontier
from benchmarks.pages import reports
from benchmarks.pages.reports import rows_of
from benchmarks.pages.tables import markdown_table

README_MODELS = ("gpt", "chain256", "bert", "resnet", "llama", "vit", "chain1024")
SLICED = ("head", "long")
"""Models of `benchmarks.slices`, which no other benchmark has."""
BUDGETS = ("0.8", "0.6", "0.4", "0.3", "min")
LONGEST_REASON = 100
"""Letters of a reason that are shown."""


# -- peaks on a CPU ---------------------------------------------------------------------------------------------------


def readme_table() -> str:
    """Some models of `promise` and of `slices`, a line each; "-" where nothing was measured."""
    return _peaks(README_MODELS, ("0.6", "0.4", "min"), {"of it gradients": _gradients})


def cpu_table() -> str:
    """All models of `promise` and those of `slices`, a line each."""
    names = list(dict.fromkeys(row.model for row in rows_of("promise_cpu.json")))
    return _peaks(names, BUDGETS, {"of it gradients": _gradients, "worst error": _worst_error})


def _peaks(models: Sequence[str], budgets: Sequence[str], more: Mapping[str, Callable[[Sequence[Row]], str]]) -> str:
    early = {row.model: row.early_bytes for row in rows_of("floor_cpu.json")}
    titles = ["model", "torch.compile", "lowest with torch's own setting"]
    titles += [f"`{each}`" if each == "min" else f"budget {each}" for each in budgets]
    titles += [*more, '`min`, `gradients="early"`', '`min`, `slices="auto"`']
    lines = []
    for name in models:
        rows = [row for row in rows_of("promise_cpu.json") if row.model == name]
        ours = {row.setting: row for row in rows if row.kind == "remat"}
        peaks = [promise.peak_text(ours.get(budget)) for budget in budgets]
        lowest = mib(promise.torchs_lowest(name, rows))
        others = [text(rows) for text in more.values()]
        lines.append([name, promise.peak_text(_plain(rows)), lowest, *peaks, *others, mib(early.get(name)), "-"])
    for row in rows_of("slices_cpu.json"):
        if row.case in SLICED:
            peaks = [mib(row.whole_peak_bytes) if budget == "min" else "-" for budget in budgets]
            unknown = ["-"] * (len(more) + 1)
            lines.append([row.case, mib(row.plain_peak_bytes), "-", *peaks, *unknown, mib(row.sliced_peak_bytes)])
    return markdown_table((titles, lines))


def _plain(rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row.kind == "plain")


def _gradients(rows: Sequence[Row]) -> str:
    return mib(_plain(rows).gradient_bytes)


def _worst_error(rows: Sequence[Row]) -> str:
    errors = promise.summarise(rows).errors
    return f"{max(errors):.2%}" if errors else "-"


# -- a GPU ------------------------------------------------------------------------------------------------------------

GPU_TITLES = (
    "model", "dtype", "torch.compile", "every block checkpointed", "ours at the peak of checkpoints", "torch's own 0.5",
    "ours at the peak of torch's 0.5", "ours at 0.5", "`min`", "prediction off by at most",
)  # fmt: skip


def gpu_table() -> str:
    """Peaks of each model on a GPU, with the time of a step where it was measured."""
    lines = []
    for points in reports.contests().values():
        model = next(name.removesuffix(".json") for name, each in reports.contests().items() if each is points)
        runs = {point.name: point for point in points}
        names = ("plain default", "checkpoint blocks", "remat at checkpoint blocks", "torch 0.5", "remat at torch 0.5")
        cells = [_point(runs.get(name)) for name in (*names, "remat 0.5", "remat min")]
        lines.append([f"{model}, large", "bfloat16", *cells, _off(point.peak_error for point in points)])
    rows = rows_of("gpu_peaks_h200.json")
    for model, dtype in dict.fromkeys((row.model, row.dtype) for row in rows):
        mine = {row.setting: row for row in rows if (row.model, row.dtype) == (model, dtype)}
        plain, rival, half, lowest = (_peak(mine.get(each)) for each in (gpu_peaks.PLAIN, "torch 0.5", "0.5", "min"))
        lines.append(
            [model, dtype, plain, "-", "-", rival, "-", half, lowest, _off(row.error for row in mine.values())]
        )
    return markdown_table((GPU_TITLES, lines))


def _point(point: frontier.Point | None) -> str:
    return "-" if point is None or point.peak_bytes is None else f"{mib(point.peak_bytes)} MiB, {ms(point.step_ns)} ms"


def _peak(row: gpu_peaks.PeakRow | None) -> str:
    return "floor" if row is not None and row.floor_bytes is not None else mib(row.peak_bytes if row else None)


def _off(errors: Any) -> str:
    known = [error for error in errors if error is not None]
    return f"{max(known, key=abs):+.2%}" if known else "-"


# -- plans and their time ---------------------------------------------------------------------------------------------


def gap_table() -> str:
    """A line for each graph: the lowest peak and its bound, and extra time less its bound at each budget."""
    rows = [row for row in rows_of("gap_cpu.json") if row.kind != "exact"]
    lines = []
    for name in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == name]
        gaps = [f"{percent(row.extra)} ({percent(row.gap)})" if row.is_feasible else "floor" for row in mine]
        lines.append([name, mib(mine[0].floor_bytes), mib(mine[0].least_bytes), *gaps])
    return markdown_table((("model", "lowest peak", "none below", *map(str, gap.FRACTIONS)), lines))


def time_table() -> str:
    """A line for each model: CPU time until training runs, and that of planning, both beside plain torch.compile's."""
    first, planning = rows_of("first_step_cpu.json"), {row.model: row for row in rows_of("planning_time_cpu.json")}
    lines = []
    for name in dict.fromkeys([*(row.model for row in first), *planning]):
        mine = {row.setting: row for row in first if row.model == name and row.cold is not None}
        plain = mine.get(first_step.PLAIN)
        line = [name, f"{plain.cold.cpu_s:.1f} s" if plain else "-"]
        for at in (0, 1):
            ours = [mine.get(setting) for setting in first_step.SETTINGS]
            line += ["-" if row is None else first_step.ratio_text(first_step.ratios(row, first)[at]) for row in ours]
        plan = planning.get(name)
        if plan is None:
            line += ["-"] * 3
        else:
            line += [f"{plan.torch_s:.2f} s", f"{plan.half_s / plan.torch_s:.2f}", f"{plan.min_s / plan.torch_s:.2f}"]
        lines.append(line)
    titles = ("model", "torch.compile", "0.5", "min", "0.5, warm", "min, warm", "torch's partitioner", "0.5", "min")
    return markdown_table((titles, lines))


# -- tools ------------------------------------------------------------------------------------------------------------


def tool_table(*libraries: str) -> Callable[[], str]:
    """Returns a function that makes a table of the tools whose names begin with one of those of libraries."""
    return lambda: markdown_table(
        stacks.table([row for row in rows_of("stacks_cpu.json") if row.tool.startswith(libraries)])
    )


# -- misses -----------------------------------------------------------------------------------------------------------


def miss_table() -> str:
    """The rows that fall short, those of one model with the same reason on one line."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for file, (model, setting, reason) in reports.misses():
        found.setdefault((file, model, _short(reason)), []).append(setting)
    lines = [
        [model, ", ".join(filter(None, rows)) or "-", why, f"`{file}`"] for (file, model, why), rows in found.items()
    ]
    return markdown_table((("model", "rows", "falls short", "file"), lines))


def _short(reason: str) -> str:
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON].rpartition(' ')[0]} ..."


def _summed_up(table: Callable[[], str], *files: str) -> Callable[[], str]:
    """Returns a function that makes the table and puts the summaries of those results below it."""
    return lambda: "\n\n".join([table(), *map(reports.summary, files)])


TABLES: dict[str, Callable[[], str]] = {
    "table": readme_table,
    "gpu": _summed_up(gpu_table, "gpu_peaks_h200.json"),
    "cpu": _summed_up(cpu_table, "promise_cpu.json"),
    "gaps": _summed_up(gap_table, "gap_cpu.json"),
    "times": _summed_up(time_table, "first_step_cpu.json", "planning_time_cpu.json"),
    "misses": miss_table,
    "lightning_tools": tool_table("Lightning", "Fabric"),
    "vision_models": tool_table("timm", "diffusers"),
}
