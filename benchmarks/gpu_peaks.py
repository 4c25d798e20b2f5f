"""Peaks on a GPU: what a plan predicts, what the emitted code says, what the allocator measures.

    python -m benchmarks.gpu_peaks [--model gpt] [--dtype bfloat16] [--workers 14] [--minutes 5] [--json OUT]
    python -m benchmarks.gpu_peaks --show --json OUT

The models of `benchmarks.models.codegen`, those of `benchmarks.cuda_codegen`, train on a device. `plain` is torch.compile,
ours has byte budgets of 0.8, 0.5 and 0.3 of plain's measured peak and `min`; "torch 0.5" and "torch 0.1" are torch's own
`activation_memory_budget`. Peaks are those of the third step, above the level before it (`max_memory_allocated`); the errors are
of the prediction and of the dry run of the emitted code, against what was measured. `reserved` is what a step adds to
`memory_reserved`, and `gradients` the relative difference from plain's gradients: other plans round in other places. "floor":
the budget is below the lowest reachable peak, and a `BudgetError` says so.

Each model and dtype has a process of its own, `--workers` at once: peaks are of one process, nothing is timed. Rows are stored
in OUT one by one, and those that are there already are not made again. Processes still at work after `--minutes` are stopped.
The exit status is 1 if a peak is above its budget or more than 3 % from its prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import harness
from benchmarks.common.code_only import peaks_of_rounds
from benchmarks.common.compile_caches import without_graph_caches
from benchmarks.common.harness import mib, percent
from benchmarks.common.torch_budget import torch_activation_budget
from benchmarks.contest.frontier import relative_error
from benchmarks.contest.runs import differences, failure_of, fresh_state, samples
from benchmarks.models import codegen

DTYPES = ("bfloat16", "float32")
PLAIN = "plain"
BUDGETS = ("0.5", "min", "0.8", "0.3")
RIVALS = ("torch 0.5", "torch 0.1")
SETTINGS = (PLAIN, *BUDGETS, *RIVALS)
WORST_ERROR = 0.03
TITLES = (
    "model", "dtype", "setting", "budget", "predicted", "dry run", "measured", "error", "dry run's", "reserved", "predicted",
    "rounds", "gradients", "wall s", "note",
)  # fmt: skip


@dataclass(frozen=True)
class PeakRow:
    """One setting of one model, measured on a device.

    Attributes:
        level_bytes: In use before the step: parameters, inputs, workspaces of libraries.
        peak_bytes: The most in use during the step above that level.
        requested_bytes: `peak_bytes` before the allocator rounds up.
        reserved_bytes: Device memory that the allocator reserves for the step, beyond the segments reserved before the step.
        predicted_peak_bytes: Peak by the first plan.
        first_scheduled_bytes: Peak of the code that was emitted for the first plan.
        scheduled_peak_bytes: Peak of the code that runs.
        predicted_reserved_bytes: The report's `reserved_peak_bytes`.
        rounds: Number of times the model was planned and compiled.
        first_step_peak_bytes: The most in use during the first step above what there was before, tuning and workspaces included.
        gradient_difference: Norm of the difference from plain's gradients over the norm of these, of evenly spaced samples.
        floor_bytes: `floor_bytes` of the BudgetError that was raised.
    """

    model: str
    dtype: str
    setting: str
    budget_bytes: int | None = None
    level_bytes: int | None = None
    peak_bytes: int | None = None
    requested_bytes: int | None = None
    reserved_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    first_scheduled_bytes: int | None = None
    scheduled_peak_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    rounds: int | None = None
    first_step_peak_bytes: int | None = None
    gradient_difference: float | None = None
    floor_bytes: int | None = None
    message: str = ""
    failure: str | None = None
    wall_s: float = 0.0

    @property
    def error(self) -> float | None:
        """Error of the prediction, as a part of the measured peak."""
        return relative_error(self.predicted_peak_bytes, self.peak_bytes)

    @property
    def dry_run_error(self) -> float | None:
        return relative_error(self.scheduled_peak_bytes, self.peak_bytes)

    @property
    def is_over(self) -> bool:
        return self.budget_bytes is not None and (self.peak_bytes or 0) > self.budget_bytes


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.only is not None:
        with without_graph_caches():
            for row in rows_here(
                arguments.only[0], arguments.only[1], arguments.only[2:], arguments.plain, arguments.device
            ):
                print(json.dumps(asdict(row)), flush=True)
        return 0
    head, rows = harness.stored_rows(arguments.json, {}, lambda fields: PeakRow(**fields))
    if not arguments.show:
        head = harness.header(arguments.device)
        measure(arguments, head, rows)
    harness.print_header(head)
    print(harness.ascii_table(TITLES, [cells(row) for row in rows]), end="\n\n")
    print(summary(rows))
    return int(any(row.failure or row.is_over or abs(row.error or 0.0) > WORST_ERROR for row in rows))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser_of_stored_rows(__doc__, codegen.CASES, DTYPES)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="may be repeated; default all")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu, to try the command")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes at once (default: one a core)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of it (default 30)")
    parser.add_argument("--only", nargs="+", metavar="MODEL DTYPE SETTING", help="these rows here, as lines of JSON")
    parser.add_argument("--plain", type=int, default=0, help="with --only: plain's peak in bytes")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, head: dict[str, str], rows: list[PeakRow]) -> None:
    """Append to `rows`, and store, the rows that are missing."""
    deadline, lock = time.monotonic() + 60 * arguments.minutes, threading.Lock()

    def put(row: PeakRow) -> None:
        with lock:
            rows[:] = [known for known in rows if _run_of(known) != _run_of(row)] + [row]
            harness.write_json(arguments.json, head, rows)
            harness.progress("  ".join(cells(row)))

    def made(model: str, dtype: str) -> None:
        known = {row.setting: row for row in rows if (row.model, row.dtype) == (model, dtype) and row.failure is None}
        settings = [setting for setting in arguments.setting or SETTINGS if setting not in known]
        if settings:
            plain_bytes = known[PLAIN].peak_bytes if PLAIN in known else 0
            _of_process(model, dtype, settings, plain_bytes or 0, arguments.device, deadline, put)

    with ThreadPoolExecutor(arguments.workers) as pool:
        models, dtypes = arguments.model or codegen.CASES, arguments.dtype or DTYPES
        jobs = [pool.submit(made, model, dtype) for dtype in dtypes for model in models]
        for job in jobs:
            job.result()


def _run_of(row: PeakRow) -> tuple[str, str, str]:
    return row.model, row.dtype, row.setting


def _of_process(
    model: str, dtype: str, settings: Sequence[str], plain_bytes: int, device: str, deadline: float, put: Any
) -> None:
    """Hand on the rows of a process of its own as they come; after `deadline` it is stopped."""
    command = [sys.executable, "-m", "benchmarks.gpu_peaks", "--device", device, "--plain", str(plain_bytes)]
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2", **os.environ}
    only = ["--only", model, dtype, *settings]
    with subprocess.Popen([*command, *only], stdout=subprocess.PIPE, text=True, env=environment) as process:
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                put(PeakRow(**json.loads(line)))
        timer.cancel()
    if process.returncode:
        harness.progress(f"{model} {dtype}: the process ended with status {process.returncode}")


# -- one process ------------------------------------------------------------------------------------------------------


def rows_here(model: str, dtype: str, settings: Sequence[str], plain_bytes: int, device: str) -> Iterator[PeakRow]:
    """A row for each setting; what fails says why."""
    expected: list[Tensor] = []
    for setting in settings:
        start, row = time.perf_counter(), PeakRow(model, dtype, setting)
        if setting in BUDGETS and setting != "min":
            row = replace(row, budget_bytes=int(float(setting) * plain_bytes))
        with fresh_state(device):
            try:
                row, found = _measured(row, device)
            except Exception as error:  # one row must not lose the others
                row, found = replace(row, **failure_of(error)), []
        if setting == PLAIN:
            plain_bytes, expected = row.peak_bytes or plain_bytes, found
        elif found and expected:
            row = replace(row, gradient_difference=differences(found, expected)[0])
        yield replace(row, wall_s=round(time.perf_counter() - start, 1))


def _measured(row: PeakRow, device: str) -> tuple[PeakRow, list[Tensor]]:
    import compile_remat

    torch.manual_seed(0)
    with torch.device(device):
        case = codegen.build(row.model, getattr(torch, row.dtype))
    is_cuda = torch.device(device).type == "cuda"
    ratio = float(row.setting.split()[1]) if row.setting in RIVALS else None
    with peaks_of_rounds() as rounds, nullcontext() if ratio is None else torch_activation_budget(ratio):
        run = harness.plain(case)
        if row.setting in BUDGETS:
            run = harness.remat(case, row.budget_bytes or row.setting)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if is_cuda else 0
        run.clear_and_step()
        first = torch.cuda.max_memory_allocated(device) - before if is_cuda else None
        run.clear_and_step()
        run.clear()
        level = torch.cuda.memory_allocated(device) if is_cuda else None
        if is_cuda:
            torch.cuda.empty_cache()  # else segments of the first step, with its tuning, count as reserved
        level_reserved = torch.cuda.memory_reserved(device) if is_cuda else 0
        peak = harness.second_step_peak(run, device)
        reserved = torch.cuda.max_memory_reserved(device) - level_reserved if is_cuda else None
        torch.manual_seed(1)
        run.clear_and_step()
    row = replace(
        row,
        level_bytes=level,
        peak_bytes=peak.peak_bytes,
        requested_bytes=peak.requested_bytes,
        reserved_bytes=reserved,
        first_step_peak_bytes=first,
    )
    if row.setting in BUDGETS:
        report = max(compile_remat.reports(), key=lambda each: each.predicted_peak_bytes or 0)
        row = replace(
            row,
            predicted_peak_bytes=rounds[0][0] if rounds else report.predicted_peak_bytes,
            first_scheduled_bytes=rounds[0][1] if rounds else None,
            scheduled_peak_bytes=report.scheduled_peak_bytes,
            predicted_reserved_bytes=report.reserved_peak_bytes,
            rounds=len(rounds),
            message=report.message,
        )
    return row, samples([parameter.grad for parameter in run.module.parameters()])


# -- what they show ---------------------------------------------------------------------------------------------------


def cells(row: PeakRow) -> list[str]:
    notes = [
        "above the budget" if row.is_over else "",
        f"floor {mib(row.floor_bytes)}" if row.floor_bytes is not None else "",
        row.failure or "",
        row.message,
    ]
    return [
        row.model, row.dtype, row.setting, mib(row.budget_bytes), mib(row.predicted_peak_bytes), mib(row.scheduled_peak_bytes),
        mib(row.peak_bytes), percent(row.error), percent(row.dry_run_error), mib(row.reserved_bytes),
        mib(row.predicted_reserved_bytes), str(row.rounds or "-"),
        "-" if row.gradient_difference is None else f"{row.gradient_difference:.1e}", f"{row.wall_s:.0f}",
        "; ".join(note for note in notes if note),
    ]  # fmt: skip


def summary(rows: Sequence[PeakRow]) -> str:
    """Text that says how well predicted, emitted and measured peaks agree."""
    lines = [
        f"above the budget: {sum(row.is_over for row in rows)} of {sum(row.budget_bytes is not None for row in rows)} rows"
    ]
    for name, errors in (
        ("prediction", [row.error for row in rows if row.error is not None]),
        ("dry run", [row.dry_run_error for row in rows if row.dry_run_error is not None]),
    ):
        if errors:
            sizes = [abs(error) for error in errors]
            lines.append(
                f"error of the {name}: median {statistics.median(sizes):.2%}, worst {max(sizes):.2%} "
                f"({min(errors):+.2%} to {max(errors):+.2%}), {len(errors)} rows"
            )
    return "\n".join(
        [*lines, *(f"{row.model} {row.dtype} {row.setting}: {row.failure}" for row in rows if row.failure)]
    )


if __name__ == "__main__":
    sys.exit(main())
