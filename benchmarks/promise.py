"""Does the promise hold: measured peak within the budget, and the prediction near it, over many models.

    python -m benchmarks.promise [--model vit] [--device cuda] [--toy] [--json OUT] [--no-torch]

Each model trains under 0.8, 0.6, 0.4 and 0.3 of plain torch.compile's measured peak, and under `min`. `predicted` is the
plan's figure, `scheduled` that of the code that Inductor emitted, `measured` the allocator's; errors are against the
measured one. `torch` is the lowest measured peak of torch's `activation_memory_budget` over all its values. The held-out
models (*) were written before the memory model was fitted, deep ones (+) have 8 blocks or more. The exit status is 1 if a
measured peak is above its budget, or `min` above torch's lowest.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import harness, models, table_a
from benchmarks.harness import mib, percent
from benchmarks.table_a import FRACTIONS, TORCH_BUDGETS, Runner
from benchmarks.verdicts import FLOOR_TOLERANCE, Row
from compile_remat._torch_bench import private_compile_caches

TITLES = ("model", "setting", "budget", "predicted", "scheduled", "measured", "use", "error", "sched error", "verdict")


@dataclass(frozen=True)
class Summary:
    """What a whole table comes to.

    Attributes:
        errors: |predicted - measured| / measured of every row that was measured under a limit.
        scheduled_errors: The same of the scheduled peak.
        over: Rows above their budget.
        ratios: `min` over torch's lowest peak, by model.
    """

    errors: list[float]
    scheduled_errors: list[float]
    over: list[Row]
    ratios: dict[str, float]

    def __str__(self) -> str:
        lines = [f"above the budget: {len(self.over)} of {len(self.errors)} rows"]
        for name, errors in (("prediction", self.errors), ("schedule", self.scheduled_errors)):
            if errors:
                lines.append(f"error of the {name}: median {statistics.median(errors):.2%}, worst {max(errors):.2%}")
        if self.ratios:
            lines.append(
                f"min / torch's lowest: {_mean(self.ratios)} in the geometric mean, worst {max(self.ratios.values()):.2f}"
            )
        deep = {name: ratio for name, ratio in self.ratios.items() if name in models.DEEP}
        if deep:
            lines.append(f"the same over models of 8 blocks or more: {_mean(deep)}")
        return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", action="append", choices=list(models.CASES), help="may be repeated; default all")
    parser.add_argument("--no-torch", action="store_true", help="leave torch's own budgets out: a third of the time")
    parser.set_defaults(steps=1)
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    everything: list[Row] = []
    with private_compile_caches():
        for name in arguments.model or models.CASES:
            rows = rows_of_model(name, arguments)
            everything += rows
            print(harness.ascii_table(TITLES, [_cells(row, rows) for row in rows]), end="\n\n", flush=True)
            harness.write_json(arguments.json, head, everything)  # after each model: the whole takes an hour
    summary = summarise(everything)
    print(summary)
    return int(bool(summary.over) or any(ratio > 1 for ratio in summary.ratios.values()))


def rows_of_model(name: str, arguments: argparse.Namespace) -> list[Row]:
    runner = Runner(name, arguments)
    rows = [runner.plain()]
    peak = rows[0].peak_bytes
    if not arguments.no_torch:
        rows += [runner.torch_budget(value) for value in TORCH_BUDGETS]
    if peak is not None:
        rows += [runner.remat(str(fraction), int(fraction * peak)) for fraction in FRACTIONS]
    return [*rows, runner.remat("min", "min")]


def summarise(rows: Sequence[Row]) -> Summary:
    """Over all models at once."""
    ours = [row for row in rows if row.kind == "remat" and row.peak_bytes and row.predicted_peak_bytes]
    ratios = {}
    for row in ours:
        lowest = torchs_lowest(row.model, rows)
        if row.setting == "min" and lowest and row.peak_bytes:
            ratios[row.model] = row.peak_bytes / lowest
    return Summary(
        [abs(_error(row.predicted_peak_bytes, row)) for row in ours],
        [abs(_error(row.scheduled_peak_bytes, row)) for row in ours if row.scheduled_peak_bytes],
        [row for row in ours if row.use is not None and row.use > 1],
        ratios,
    )


def torchs_lowest(model: str, rows: Sequence[Row]) -> int | None:
    """The lowest measured peak over all of torch's budgets."""
    peaks = [row.peak_bytes for row in rows if row.model == model and row.kind == "torch" and row.peak_bytes]
    return min(peaks, default=None)


def verdict(row: Row, rows: Sequence[Row]) -> str:
    """Empty where there is nothing to say."""
    if row.failure is not None:
        return f"miss: {row.failure}"
    if row.floor_bytes is not None:
        lowest = next((r.peak_bytes for r in rows if r.kind == "remat" and r.setting == "min"), None)
        text = table_a.floor_text(row, rows)
        is_right = lowest is not None and abs(row.floor_bytes / lowest - 1) <= FLOOR_TOLERANCE
        return text if is_right else f"miss: {text}"
    if row.kind != "remat":
        return ""
    if row.use is not None and row.use > 1:
        return "miss: above the budget"
    torch_bytes = torchs_lowest(row.model, rows)
    if row.setting == "min" and torch_bytes and row.peak_bytes:
        ratio = row.peak_bytes / torch_bytes
        return f"{'miss: ' if ratio > 1 else ''}{ratio:.2f} of torch's lowest"
    return "ok"


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    marks = "*" * (row.model in models.HELD_OUT) + "+" * (row.model in models.DEEP)
    has_plan = row.peak_bytes is not None and row.predicted_peak_bytes is not None
    return [
        row.model + marks,
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


def _error(figure: int | None, row: Row) -> float:
    assert figure is not None and row.peak_bytes
    return figure / row.peak_bytes - 1


def _mean(ratios: dict[str, float]) -> str:
    return f"{math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values())):.2f}"


if __name__ == "__main__":
    sys.exit(main())
