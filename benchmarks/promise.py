"""Does the promise hold: measured peak within the budget, and the prediction near it, over many models.

    python -m benchmarks.promise [--model vit] [--device cuda] [--toy] [--json OUT] [--only remat] [--rivals JSON] [--hold]
                                 [--dtype bfloat16] [--code-only] [--empty-kernels]
    python -m benchmarks.promise --show JSON [--show JSON ...]
    python -m benchmarks.promise --stale JSON [--drop] [--dtype bfloat16] [--model vit]

Each model trains under 0.8, 0.6, 0.4 and 0.3 of plain torch.compile's measured peak, and under `min`. `predicted` is the
plan's figure, `scheduled` that of the code that Inductor emitted, `measured` the allocator's; errors are against the
measured one. `torch` is the lowest measured peak of torch's `activation_memory_budget` over all its values. The held-out
models (*) were written before the memory model was fitted, deep ones (+) have 8 blocks or more. Torch's rows take most of the
time and do not change with our code: `--rivals` takes them from a file that `--json` wrote. `--code-only` builds no kernel and
measures nothing: budgets are shares of the peak of plain's emitted code, and `scheduled` is all that a prediction is compared
with. `--empty-kernels` measures as ever, but the kernels that Inductor emits are not built and do nothing: they would allocate
nothing either, and what allocates, the emitted code and the libraries that it calls, runs. Each row is stored in the file of
`--json` as soon as it is known, and a row that stands there is not run again, unless it has no measured peak and is to be
measured. `--show` runs nothing and prints the lines of files that `--json` wrote, a line for each model: measured peaks by
budget, "floor" where it is below the lowest reachable peak, and in how far the figures agree.

`--stale` compiles nothing: it plans each of our rows of a file again, for the bytes that it had, and lists those with another
predicted peak, floor or extra time; rows that failed stay. Another extra time means another plan. If the peak alone differs, the
memory model has changed, or the libraries take other workspaces on this processor (products in bfloat16 do), or the stored figure
is that of a second round. `--drop` takes the listed rows out of the file, so that the next run with `--json` makes them anew.

The exit status is 1 if a measured peak is above its budget or that of a larger one, an error above 3 %, or `min` above torch's
lowest; with `--stale` if a row is listed.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.code_only import kernels_replaced_by
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.harness import mib, percent
from benchmarks.common.result_rows import Row, lowest_peak
from benchmarks.common.row_store import RowStore, rows_of_file
from benchmarks.common.runner import FRACTIONS, TORCH_BUDGETS, CodeRunner, Runner, floor_text
from benchmarks.common.stale_rows import StaleRow, planned_again
from benchmarks.common.stale_rows import table as stale_table

TITLES = ("model", "setting", "budget", "predicted", "scheduled", "measured", "use", "error", "sched error", "verdict")
WORST_ERROR = 0.03
FLOOR_TOLERANCE = 0.01


@dataclass(frozen=True)
class Summary:
    """Summary of a whole table.

    Attributes:
        errors: |predicted - measured| / measured of every row that was measured under a limit.
        scheduled_errors: The same of the scheduled peak.
        codegen_errors: |predicted - scheduled| / scheduled of every row with emitted code, measured or not.
        over: Rows above their budget.
        ratios: `min` over torch's lowest peak, by model.
        activation_ratios: The same with the bytes of the gradients taken from both.
        misses: Rows that fall short in any way.
    """

    errors: list[float]
    scheduled_errors: list[float]
    codegen_errors: list[float]
    over: list[Row]
    ratios: dict[str, float]
    activation_ratios: dict[str, float]
    misses: list[Row]

    def __str__(self) -> str:
        lines = [f"above the budget: {len(self.over)} of {len(self.errors)} rows"]
        named = {"prediction": self.errors, "schedule": self.scheduled_errors}
        for name, errors in {**named, "prediction against the emitted code": self.codegen_errors}.items():
            if errors:
                text = f"median {statistics.median(errors):.2%}, worst {max(errors):.2%}"
                lines.append(f"error of the {name}: {text}, {len(errors)} rows")
        if self.ratios:
            lines.append(
                f"min / torch's lowest: {_mean(self.ratios)} in the geometric mean, worst {max(self.ratios.values()):.2f}"
            )
        for what, ratios in (("", self.ratios), (", gradients taken off", self.activation_ratios)):
            deep = {name: ratio for name, ratio in ratios.items() if name in models.DEEP}
            if deep:
                lines.append(f"the same over models of 8 blocks or more{what}: {_mean(deep)}")
        lines.append(f"rows that fall short: {len(self.misses)}")
        return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.show:
        stored = [json.loads(path.read_text()) for path in arguments.show]
        shown = [row for path in arguments.show for row in rows_of_file(path)]
        harness.print_header(stored[-1]["header"])
        harness.write_json(arguments.json, stored[-1]["header"], shown)
        return _conclude(list(dict.fromkeys(row.model for row in shown)), shown)
    if arguments.stale is not None:
        return list_stale(arguments.stale, arguments)
    rivals = [] if arguments.rivals is None else rivals_of(arguments.rivals)
    head = harness.header(arguments.device)
    harness.print_header(head)
    store = RowStore(arguments.json, head)
    names = arguments.model or list(models.CASES)
    with private_compile_caches(), kernels_replaced_by(_nothing) if arguments.empty_kernels else nullcontext():
        for name in names:
            rows = rows_of_model(name, arguments, [row for row in rivals if row.model == name], store)
            print(harness.ascii_table(TITLES, [_cells(row, rows) for row in rows]), end="\n\n", flush=True)
    return _conclude(names, store.rows)


def list_stale(path: Path, arguments: argparse.Namespace) -> int:
    """Plan our rows of a file again; print those that differ, and the command's exit status.

    Raises:
        SystemExit: The file is of another version of torch, whose code other plans are for.
    """
    head, rows = json.loads(path.read_text())["header"], rows_of_file(path)
    if head["torch"] != torch.__version__:
        raise SystemExit(
            f"{path} is of torch {head['torch']}, this is {torch.__version__}: plans differ for that alone"
        )
    torch.set_num_threads(int(head["threads"]))  # workspaces of kernels depend on it
    names = arguments.model or models.CASES
    ours = [row for row in rows if row.kind == "remat" and row.model in names and row.failure is None]
    stale: list[StaleRow] = []
    for row in ours:
        harness.progress(f"{row.model}: {row.setting}")
        runner = Runner(row.model, arguments, dtype=arguments.dtype)
        found = StaleRow(row, planned_again(row, runner.case))
        if found.differs_in:
            stale.append(found)
            print(stale_table([found]), end="\n\n", flush=True)
    print(f"{len(stale)} of {len(ours)} rows differ")
    if arguments.drop:
        dropped = [found.stored for found in stale]
        harness.write_json(path, head, [row for row in rows if row not in dropped])
    return int(bool(stale))


def _nothing(*args: object) -> None:
    """A kernel that leaves its outputs as they are."""


def _conclude(names: Sequence[str], everything: Sequence[Row]) -> int:
    print(harness.ascii_table(*model_table([row for row in everything if row.model in names])), end="\n\n")
    summary = summarise(everything)
    print(summary)
    return int(bool(summary.misses))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", action="append", choices=list(models.CASES), help="may be repeated; default all")
    parser.add_argument("--only", choices=("torch", "remat"), help="leave the other rows out")
    parser.add_argument("--rivals", type=Path, metavar="JSON", help="take plain's and torch's rows from this file")
    parser.add_argument("--show", type=Path, metavar="JSON", action="append", help="run nothing, sum up this file")
    parser.add_argument(
        "--stale", type=Path, metavar="JSON", help="plan the rows of this file again, list what differs"
    )
    parser.add_argument("--drop", action="store_true", help="with --stale: take what differs out of the file")
    parser.add_argument("--dtype", choices=models.DTYPES, default="float32", help="what the models train in")
    parser.add_argument("--code-only", action="store_true", help="emit code and run it dry, build and measure nothing")
    parser.add_argument("--empty-kernels", action="store_true", help="kernels that Inductor emits do nothing")
    parser.add_argument("--hold", action="store_true", help="steps hold their output until they end, as plans count it")
    parser.set_defaults(steps=1)
    return parser.parse_args(argv)


def rivals_of(path: Path) -> list[Row]:
    """The rows that are not ours of a file that `--json` wrote."""
    return [row for row in rows_of_file(path) if row.kind != "remat"]


def rows_of_model(name: str, arguments: argparse.Namespace, rivals: Sequence[Row], store: RowStore) -> list[Row]:
    runner_type = CodeRunner if arguments.code_only else Runner
    runner = runner_type(name, arguments, once=True, hold=arguments.hold, dtype=arguments.dtype)

    def row(kind: str, setting: str, make: Callable[[], Row]) -> Row:
        return store.row(name, kind, setting, make, is_measured=not arguments.code_only)

    rows = [store.put(rival) for rival in rivals]
    if not rows:
        rows.append(row("plain", "default", runner.plain))
        if arguments.only != "remat" and not arguments.code_only:
            rows += [row("torch", f"{value:g}", partial(runner.torch_budget, value)) for value in TORCH_BUDGETS]
    if arguments.only == "torch":
        return rows
    plain = next(each for each in rows if each.kind == "plain")
    peak = plain.peak_bytes or plain.scheduled_peak_bytes
    budgets = {str(fraction): int(fraction * peak) for fraction in FRACTIONS} if peak else {}
    ours: dict[str, int | str] = {**budgets, "min": "min"}
    return rows + [row("remat", setting, partial(runner.remat, setting, budget)) for setting, budget in ours.items()]


def summarise(rows: Sequence[Row]) -> Summary:
    """Over all models at once."""
    ours = [row for row in rows if row.kind == "remat"]
    measured = [row for row in ours if row.peak_bytes and row.predicted_peak_bytes]
    ratios, activation_ratios = {}, {}
    for row in measured:
        lowest = torchs_lowest(row.model, rows)
        if row.setting == "min" and lowest and row.peak_bytes:
            ratios[row.model] = row.peak_bytes / lowest
            gradient_bytes = row.gradient_bytes or 0
            activation_ratios[row.model] = (row.peak_bytes - gradient_bytes) / (lowest - gradient_bytes)
    return Summary(
        [abs(_error(row.predicted_peak_bytes, row)) for row in measured],
        [abs(_error(row.scheduled_peak_bytes, row)) for row in measured if row.scheduled_peak_bytes],
        [
            abs(row.predicted_peak_bytes / row.scheduled_peak_bytes - 1)
            for row in ours
            if row.predicted_peak_bytes and row.scheduled_peak_bytes
        ],
        [row for row in measured if row.use is not None and row.use > 1],
        ratios,
        activation_ratios,
        [row for row in ours if verdict(row, [r for r in rows if r.model == row.model]).startswith("miss")],
    )


def torchs_lowest(model: str, rows: Sequence[Row]) -> int | None:
    """The lowest measured peak over all of torch's budgets."""
    peaks = [row.peak_bytes for row in rows if row.model == model and row.kind == "torch" and row.peak_bytes]
    return min(peaks, default=None)


def verdict(row: Row, rows: Sequence[Row]) -> str:
    """The row's floor, misses or ratio, else "ok"; empty for a rival's row or one without a peak.  `rows` are of one model."""
    if row.failure is not None:
        return f"miss: {row.failure}"
    if row.floor_bytes is not None:
        lowest = lowest_peak(rows)
        text = floor_text(row, rows)
        is_right = lowest is not None and abs(row.floor_bytes / lowest - 1) <= FLOOR_TOLERANCE
        return text if is_right and row.budget_bytes and row.budget_bytes < lowest else f"miss: {text}"
    if row.kind != "remat" or not row.peak_bytes:
        return ""
    torch_bytes = torchs_lowest(row.model, rows) if row.setting == "min" else None
    reasons = []
    if row.use is not None and row.use > 1:
        reasons.append("above the budget")
    if any((larger.peak_bytes or row.peak_bytes) < row.peak_bytes for larger in _larger(row, rows)):
        reasons.append("above the peak of a larger budget")
    if row.predicted_peak_bytes and abs(_error(row.predicted_peak_bytes, row)) > WORST_ERROR:
        reasons.append(f"error above {WORST_ERROR:.0%}")
    if torch_bytes and row.peak_bytes > torch_bytes:
        reasons.append("above torch's lowest")
    ratio = f"{row.peak_bytes / torch_bytes:.2f} of torch's lowest" if torch_bytes else "ok"
    return "miss: " + "; ".join(reasons) if reasons else ratio


def _larger(row: Row, rows: Sequence[Row]) -> list[Row]:
    budget_bytes = row.budget_bytes or 0
    return [r for r in rows if r.kind == "remat" and r.budget_bytes and r.budget_bytes > budget_bytes]


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    has_plan = row.peak_bytes is not None and row.predicted_peak_bytes is not None
    return [
        _marked(row.model),
        f"{row.kind} {row.setting}",
        mib(row.budget_bytes),
        mib(row.predicted_peak_bytes),
        mib(row.scheduled_peak_bytes),
        mib(row.peak_bytes),
        percent(row.use),
        percent(_error(row.predicted_peak_bytes, row)) if has_plan else "-",
        percent(_error(row.scheduled_peak_bytes, row)) if has_plan and row.scheduled_peak_bytes else "-",
        verdict(row, rows),
    ]


def model_table(rows: Sequence[Row]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles and cells: one line for each model."""
    return _model_titles(), [_model_cells(name, rows) for name in dict.fromkeys(row.model for row in rows)]


def _model_titles() -> tuple[str, ...]:
    return (
        "model", "default", *map(str, FRACTIONS), "min", "torch's lowest", "min/torch's", "gradients", "without them",
        "worst error", "highest use", "verdict",
    )  # fmt: skip


def _model_cells(name: str, everything: Sequence[Row]) -> list[str]:
    """Cells of the one line of a model."""
    rows = [row for row in everything if row.model == name]
    plain = next(row for row in rows if row.kind == "plain")
    summary = summarise(rows)
    uses = [row.use for row in rows if row.kind == "remat" and row.use is not None]
    misses = [f"{row.setting} {verdict(row, rows).removeprefix('miss: ')}" for row in summary.misses]
    ratio, activation_ratio = summary.ratios.get(name), summary.activation_ratios.get(name)
    ours = {row.setting: row for row in rows if row.kind == "remat"}
    return [
        _marked(name),
        mib(plain.peak_bytes),
        *(peak_text(ours.get(str(fraction))) for fraction in FRACTIONS),
        mib(lowest_peak(rows)),
        mib(torchs_lowest(name, rows)),
        "-" if ratio is None else f"{ratio:.2f}",
        percent(plain.gradient_bytes / plain.peak_bytes if plain.gradient_bytes and plain.peak_bytes else None),
        "-" if activation_ratio is None else f"{activation_ratio:.2f}",
        f"{max(summary.errors):.2%}" if summary.errors else "-",
        percent(max(uses, default=None)),
        "; ".join(misses) or "ok",
    ]


def peak_text(row: Row | None) -> str:
    """The measured peak in MiB, or "floor" where the answer was a BudgetError."""
    return "floor" if row is not None and row.floor_bytes is not None else mib(None if row is None else row.peak_bytes)


def _marked(name: str) -> str:
    return name + "*" * (name in models.HELD_OUT) + "+" * (name in models.DEEP)


def _error(figure: int | None, row: Row) -> float:
    assert figure is not None and row.peak_bytes
    return figure / row.peak_bytes - 1


def _mean(ratios: dict[str, float]) -> str:
    return f"{math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values())):.2f}"


if __name__ == "__main__":
    sys.exit(main())
