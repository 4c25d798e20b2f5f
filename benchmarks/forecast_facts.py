"""Forecasts for an H100 that is not there, against the code that Inductor emits for it: observed plans and estimates.

    python -m benchmarks.forecast_facts [--model gpt] [--dtype bf16] [--json OUT] [--show]

For each model of `benchmarks.models.codegen`, budget and type: the peak that `forecast` predicts where it has the graphs lowered,
the same as an estimate (`--estimate`), and the peak of the code that is emitted on the fake device for that budget, by a dry run of
forward and backward.  An estimate has a plan of its own; its error is that of the figure that people read.

Rows are stored in OUT one by one, and those that are there already are not made again.  Needs g++ and the package `triton`.  The
exit status is 1 if an observed forecast is off by more than 512 bytes, or an estimate by more than 8 %.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from benchmarks.common import harness
from benchmarks.common.harness import mib
from benchmarks.models.codegen import CASES
from compile_remat.budget import MemoryBudget
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.forecasting import Forecast, forecast
from compile_remat.forecast.target_step import Target

DEVICE = "h100-sxm"
DTYPES = ("bf16", "fp32")
BUDGETS = ("0.5", "min")
TOLERANCE_BYTES = 512
WORST_ESTIMATE = 0.08
TITLES = ("model", "dtype", "budget", "emitted", "observed", "off by", "estimate", "off by", "seconds")


@dataclass(frozen=True)
class ForecastRow:
    """One setting of one model.

    Attributes:
        emitted_bytes: The peak of the code that training would run.
        observed_bytes: The peak of the forecast whose graphs were lowered.
        estimated_bytes: The peak of the forecast by rules.
        seconds, estimate_seconds: Wall time of the two forecasts, the start of a process with them.
        why: The reason why the forecast was not observed, or the error.
    """

    model: str
    dtype: str
    budget: str
    emitted_bytes: int | None = None
    observed_bytes: int | None = None
    estimated_bytes: int | None = None
    seconds: float = 0.0
    estimate_seconds: float = 0.0
    why: str = ""

    @property
    def off_bytes(self) -> int | None:
        """Observed less emitted."""
        if self.observed_bytes is None or self.emitted_bytes is None:
            return None
        return self.observed_bytes - self.emitted_bytes

    @property
    def estimate_error(self) -> float | None:
        """Estimated over emitted, less 1."""
        if self.estimated_bytes is None or not self.emitted_bytes:
            return None
        return self.estimated_bytes / self.emitted_bytes - 1

    @property
    def is_exact(self) -> bool:
        """True if the observed peak is within `TOLERANCE_BYTES` of the emitted code's peak."""
        return self.off_bytes is not None and abs(self.off_bytes) <= TOLERANCE_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    arguments = harness.parser_of_stored_rows(__doc__, CASES, DTYPES).parse_args(argv)
    versions = f"{version('torch')}, triton {version('triton')}" if not arguments.show else ""
    head = harness.header("cpu") | {"device": f"fake ({DEVICE})", "torch": versions}
    head, rows = harness.stored_rows(arguments.json, head, lambda fields: ForecastRow(**fields))
    if not arguments.show:
        for model in arguments.model or CASES:
            for dtype in arguments.dtype or DTYPES:
                for row in made(model, dtype, rows):
                    rows.append(row)
                    harness.write_json(arguments.json, head, rows)
    harness.print_header(head)
    print(harness.ascii_table(*table(rows)), end="\n\n")
    print(summary(rows))
    return int(any(not row.is_exact or abs(row.estimate_error or 0.0) > WORST_ESTIMATE for row in rows))


def made(model: str, dtype: str, known: Sequence[ForecastRow]) -> Iterator[ForecastRow]:
    """The rows of a model that are not known yet."""
    before = {row.budget for row in known if (row.model, row.dtype) == (model, dtype)}
    budgets = [budget for budget in BUDGETS if budget not in before]
    if not budgets:
        return
    harness.progress(f"{model} {dtype}: {', '.join(budgets)}")
    source = f"benchmarks.models.codegen:{model}"
    command = ["benchmarks.common.fake_cuda.forecast_rows", source, dtype, *budgets]
    for budget, emitted in zip(budgets, list(harness.rows_of_process(command)), strict=True):
        observed, seconds = _timed(source, dtype, budget, estimate=False)
        estimated, estimate_seconds = _timed(source, dtype, budget, estimate=True)
        yield ForecastRow(
            model,
            dtype,
            budget,
            emitted["peak_bytes"],
            observed.observed_peak_bytes,
            estimated.peak_bytes,
            seconds,
            estimate_seconds,
            emitted["failure"] or observed.why,
        )


def _timed(source: str, dtype: str, budget: str, *, estimate: bool) -> tuple[Forecast, float]:
    start = time.perf_counter()
    target = Target(DEVICE, MemoryBudget.parse(budget), estimate=estimate)
    found = forecast(Builder(source, dtype=dtype), target, with_max_batch=False)
    return found, time.perf_counter() - start


def table(rows: Sequence[ForecastRow]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """A line for each row; "seconds" are those of the observed forecast, and of the estimate."""
    cells: list[Sequence[str]] = [
        (
            row.model,
            row.dtype,
            row.budget,
            mib(row.emitted_bytes),
            mib(row.observed_bytes),
            "-" if row.off_bytes is None else f"{row.off_bytes:+d} bytes",
            mib(row.estimated_bytes),
            "-" if row.estimate_error is None else f"{row.estimate_error:+.2%}",
            f"{row.seconds:.0f} > {row.estimate_seconds:.0f}",
        )
        for row in rows
    ]
    return TITLES, cells


def summary(rows: Sequence[ForecastRow]) -> str:
    """Text that says how well both forecasts agree with the emitted code."""
    errors = sorted(abs(row.estimate_error) for row in rows if row.estimate_error is not None)
    if not errors:
        return "no rows"
    within = sum(error <= 0.03 for error in errors)
    lines = [
        f"observed within {TOLERANCE_BYTES} bytes of the code: {sum(row.is_exact for row in rows)} of {len(rows)}",
        f"estimates off by: median {statistics.median(errors):.2%}, worst {errors[-1]:.2%}; "
        f"within 3 %: {within} of {len(errors)}",
    ]
    return "\n".join([*lines, *(f"{row.model} {row.dtype} {row.budget}: {row.why}" for row in rows if row.why)])


if __name__ == "__main__":
    sys.exit(main())
