"""Peaks of the Triton code that Inductor emits for an H100, on a machine without a GPU: code generation alone.

    python -m benchmarks.cuda_codegen [--model gpt] [--dtype bfloat16] [--json OUT] [--show]

For each model of `benchmarks.models.codegen` the wrappers of forward and backward are run dry (every allocation, no kernel),
which gives the peak of the step.  `plain` is torch's own partitioner, `torch's best` the lowest peak over its values of
`activation_memory_budget`.  Ours has byte budgets of 0.8, 0.5 and 0.3 of plain's peak, and `min`: the peak that the report
predicts, that of the emitted code, and the number of plans that were lowered.  "floor": the budget is below the lowest reachable
peak, and a `BudgetError` says so.

Rows are stored in OUT one by one, and those that are there already are not made again; `--show` makes none.  Needs g++ and the
package `triton` (see benchmarks/common/fake_cuda).  The exit status is 1 if the code of a row is more than 0.1 % above its
prediction.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from benchmarks.common import harness
from benchmarks.common.harness import mib
from benchmarks.models.codegen import CASES, TRANSFORMERS

DTYPES = ("bfloat16", "float32")
PLAIN = "torch 1"
RIVALS = (PLAIN, "torch 0.5", "torch 0.3", "torch 0.1")
BUDGETS = ("0.8", "0.5", "0.3", "min")
WORST_EXCESS = 0.001
TITLES = ("model", "dtype", "plain", "torch's best", *BUDGETS, "worst excess", "min/best")


@dataclass(frozen=True)
class CodegenRow:
    """One setting of one model.

    Attributes:
        setting: ``torch R`` for torch's partitioner at ratio R, else our budget.
        predicted_peak_bytes: Peak of the plan that was taken, as its report says.
        peak_bytes: Peak of the code that would run.
        rounds: Number of plans that were lowered.
        floor_bytes: `floor_bytes` of the BudgetError that was raised.
    """

    model: str
    dtype: str
    setting: str
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    peak_bytes: int | None = None
    rounds: int | None = None
    floor_bytes: int | None = None
    failure: str | None = None

    @property
    def excess(self) -> float | None:
        """Share by which the code needs more than its report predicted."""
        if self.peak_bytes is None or not self.predicted_peak_bytes:
            return None
        return self.peak_bytes / self.predicted_peak_bytes - 1.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = harness.parser_of_stored_rows(__doc__, CASES, DTYPES).parse_args(argv)
    versions = f"{version('torch')}, triton {version('triton')}" if not arguments.show else ""
    head = harness.header("cpu") | {"device": "fake (NVIDIA H100 80GB HBM3)", "torch": versions}
    head, rows = harness.stored_rows(arguments.json, head, lambda fields: CodegenRow(**fields))
    if not arguments.show:
        for model in arguments.model or CASES:
            for dtype in arguments.dtype or DTYPES:
                for row in made(model, dtype, rows):
                    rows.append(row)
                    harness.write_json(arguments.json, head, rows)
    harness.print_header(head)
    print(harness.ascii_table(*table(rows)), end="\n\n")
    print(summary(rows))
    return int(any((row.excess or 0.0) > WORST_EXCESS or row.failure for row in rows))


def made(model: str, dtype: str, known: Sequence[CodegenRow]) -> Iterator[CodegenRow]:
    """The rows of a model that are not known yet, from a process of their own as they come."""
    before = {row.setting: row for row in known if (row.model, row.dtype) == (model, dtype)}
    settings = [setting for setting in (*RIVALS, *BUDGETS) if setting not in before]
    if not settings:
        return
    plain = before.get(PLAIN)
    given = ["--plain", str(plain.peak_bytes)] if plain is not None else []
    yield from _of_process(model, dtype, given, settings)


def _of_process(model: str, dtype: str, options: Sequence[str], settings: Sequence[str]) -> Iterator[CodegenRow]:
    """The rows of a process of their own as they come."""
    harness.progress(f"{model} {dtype}: {', '.join(settings)}")
    command = ["benchmarks.common.fake_cuda.rows", model, dtype, *options, *settings]
    yield from (CodegenRow(**fields) for fields in harness.rows_of_process(command))


def table(rows: Sequence[CodegenRow]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """A line for each model and dtype."""
    cells: list[Sequence[str]] = []
    for model, dtype in dict.fromkeys((row.model, row.dtype) for row in rows):
        mine = {row.setting: row for row in rows if (row.model, row.dtype) == (model, dtype)}
        excesses = [row.excess for row in mine.values() if row.excess is not None]
        ratio = min_ratio(list(mine.values()))
        cells.append(
            (
                model,
                dtype,
                mib(mine[PLAIN].peak_bytes) if PLAIN in mine else "-",
                mib(torchs_best(list(mine.values()))),
                *(_cell(mine.get(setting)) for setting in BUDGETS),
                f"{max(excesses):+.1%}" if excesses else "-",
                "-" if ratio is None else f"{ratio:.2f}",
            )
        )
    return TITLES, cells


def _cell(row: CodegenRow | None) -> str:
    """Predicted peak, that of the code where it differs, and the rounds if there was more than one."""
    if row is None:
        return "-"
    if row.failure is not None:
        return "failed"
    if row.predicted_peak_bytes is None:
        return "floor"
    rounds = f" ({row.rounds} rounds)" if (row.rounds or 0) > 1 else ""
    predicted, emitted = mib(row.predicted_peak_bytes), mib(row.peak_bytes)
    return f"{predicted if predicted == emitted else f'{predicted} > {emitted}'}{rounds}"


def torchs_best(rows: Sequence[CodegenRow]) -> int | None:
    """The lowest peak of torch's own over its ratios."""
    return min((r.peak_bytes for r in rows if r.setting in RIVALS and r.peak_bytes), default=None)


def min_ratio(rows: Sequence[CodegenRow]) -> float | None:
    """`min` over torch's best, of the rows of one model and dtype."""
    lowest = next((row.peak_bytes for row in rows if row.setting == "min"), None)
    best = torchs_best(rows)
    return lowest / best if lowest and best else None


def summary(rows: Sequence[CodegenRow]) -> str:
    """Text that says how well prediction and emitted code agree, and compares `min` with torch's best."""
    excesses = [row.excess for row in rows if row.excess is not None]
    if not excesses:
        return "no row of ours"
    ours = [row for row in rows if row.rounds]
    again = sum((row.rounds or 0) > 1 for row in ours)
    keys = dict.fromkeys((row.model, row.dtype) for row in rows if row.model in TRANSFORMERS)
    found = [min_ratio([row for row in rows if (row.model, row.dtype) == key]) for key in keys]
    ratios = [ratio for ratio in found if ratio is not None]
    lines = [
        f"code above its prediction: median {statistics.median(excesses):+.2%}, worst {max(excesses):+.2%}",
        f"rows with more than one plan: {again} of {len(ours)}",
    ]
    if ratios:
        lines.append(f"min / torch's best over transformers: {math.exp(statistics.fmean(map(math.log, ratios))):.2f}")
    return "\n".join(
        [*lines, *(f"{row.model} {row.dtype} {row.setting}: {row.failure}" for row in rows if row.failure)]
    )


if __name__ == "__main__":
    sys.exit(main())
