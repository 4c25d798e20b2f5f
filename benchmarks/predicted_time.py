"""Predicted extra step time of plans against what they take, each against the fastest plan in one interleaved run.

    REMAT_DEVICE=mydevice.json python -m benchmarks.predicted_time [--model gpt] [--budget 0.4] [--json OUT]

Predicted: `Report.extra_time_ns` of the plan above that of the plan `max`. Measured: the median of the interleaved ratios
of their step times, less one, times the median step of `max`. Two errors are printed, which answer different questions:
that of the extra time, as a part of the measured extra time, and the same difference as a part of the step. Beside them
stands the step of `max`, predicted and measured. Ranks are Spearman's, of the plans of one model and of all plans by their
extra time as a part of the step.

`--calibrate SECONDS` calibrates first, in the same process. On one CPU thread time is the processor time of the process.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.harness import mib, ms, percent
from benchmarks.common.timing import interleaved_ratio
from compile_remat import BudgetError
from compile_remat.cost_models.timing.calibration import calibrate
from compile_remat.cost_models.timing.clock import clock_name, cpu_clock
from compile_remat.inductor.inductor_options import compiling_alone

MODELS = ("gpt", "chain256", "bert", "mixer", "resnet", "llama")
BUDGETS = ("0.6", "0.4", "min")
TOLERANCE = 0.20
"""Tolerated error, as a part of the measured extra time."""


@dataclass(frozen=True)
class Pair:
    """One model at one budget, against its plan `max`. Times in nanoseconds; extra times as parts of the step of `max`."""

    model: str
    budget: str
    step_ns: int
    predicted_step_ns: int
    ratio: float
    ratio_low: float
    ratio_high: float
    predicted_extra_ns: int
    num_recomputed: int
    estimated_ops: tuple[str, ...] = ()

    @property
    def measured_extra_ns(self) -> float:
        """Median ratio less one, times the step."""
        return (self.ratio - 1) * self.step_ns

    @property
    def measured_part(self) -> float:
        """Measured extra time, as a part of the measured step."""
        return self.ratio - 1

    @property
    def predicted_part(self) -> float:
        """Predicted extra time, as a part of the predicted step."""
        return self.predicted_extra_ns / max(1, self.predicted_step_ns)

    @property
    def error_of_extra(self) -> float | None:
        """Predicted above measured, as a part of the measured extra time; None where none was measured."""
        measured = self.measured_extra_ns
        return None if measured <= 0 else self.predicted_extra_ns / measured - 1

    @property
    def error_of_step(self) -> float:
        """The same difference as a part of the measured step."""
        return (self.predicted_extra_ns - self.measured_extra_ns) / self.step_ns


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    head = harness.header(arguments.device)
    head["clock"] = clock_name(torch.device(arguments.device))
    with private_compile_caches(), compiling_alone(), tempfile.TemporaryDirectory() as folder:
        file = arguments.device_file
        if arguments.calibrate is not None:
            harness.progress("calibrating")
            found = calibrate(torch.device(arguments.device), arguments.calibrate, lambda text: None)
            file = str(Path(folder) / "calibrated.json")
            Path(file).write_text(json.dumps(found.content))
        head["figures"] = "calibrated in this run" if arguments.calibrate is not None else file or "device table"
        harness.print_header(head)
        pairs = [pair for name in arguments.model or MODELS for pair in pairs_of(name, file, arguments)]
    print(harness.ascii_table(*table(pairs)))
    print("\n" + summary(pairs))
    harness.write_json(arguments.json, head, pairs)
    return 0


def pairs_of(name: str, file: str | None, arguments: argparse.Namespace) -> list[Pair]:
    """All budgets of one model, interleaved with `max`."""
    torch.compiler.reset()
    budgets = arguments.budget or BUDGETS
    harness.progress(f"{name}: compiling max, {', '.join(budgets)}")
    base, base_report = _compiled(name, "max", file, arguments)
    found = []
    for budget in budgets:
        try:
            run, report = _compiled(name, budget, file, arguments)
        except BudgetError as error:
            harness.progress(f"{name} at {budget}: its lowest peak is above that, {mib(error.floor_bytes)} MiB")
            continue
        harness.progress(f"{name}: timing {arguments.pairs} pairs at {budget}")
        for each in (base, run):
            each.clear_and_step()
        clock = {"clock": cpu_clock()} if arguments.device == "cpu" else {}
        ratio = interleaved_ratio(
            base.clear_and_step, run.clear_and_step, arguments.pairs, arguments.device, arguments.seed, **clock
        )
        pair = Pair(
            name,
            budget,
            ratio.median_a_ns,
            base_report.step_time_ns + base_report.extra_time_ns,
            ratio.median,
            ratio.low,
            ratio.high,
            report.extra_time_ns - base_report.extra_time_ns,
            report.num_recomputed,
            report.estimated_ops,
        )
        harness.progress("  ".join(row(pair)))
        found.append(pair)
        run.clear()
    return found


def _compiled(name: str, budget: str, file: str | None, arguments: argparse.Namespace) -> tuple[harness.Training, Any]:
    """A model under a budget after its first step, and the report of its plan."""
    from compile_remat import reports
    from compile_remat.backend import remat

    scale = harness.scale_of(arguments)
    case = models.build(name, device=arguments.device, scale=scale, seed=arguments.seed)
    options: dict[str, Any] = {"memory_budget": float(budget) if budget[0].isdigit() else budget}
    if file:
        options["device"] = file
    run = harness.training(case, backend=remat, options=options)
    run.clear_and_step()
    return run, reports()[-1]


TITLES = ["model", "budget", "step ms", "predicted", "extra ms", "predicted", "extra", "predicted", "95 %",
          "error of extra", "of step"]  # fmt: skip


def row(pair: Pair) -> list[str]:
    low, high = percent(pair.ratio_low - 1), percent(pair.ratio_high - 1)
    error = "-" if pair.error_of_extra is None else f"{pair.error_of_extra:+.0%}"
    return [
        pair.model,
        pair.budget,
        ms(pair.step_ns),
        ms(pair.predicted_step_ns),
        ms(pair.measured_extra_ns),
        ms(pair.predicted_extra_ns),
        percent(pair.measured_part),
        percent(pair.predicted_part),
        f"{low} to {high}",
        error,
        f"{pair.error_of_step:+.1%}",
    ]


def table(pairs: Sequence[Pair]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells."""
    return TITLES, [row(pair) for pair in pairs]


def summary(pairs: Sequence[Pair]) -> str:
    """Text with the number of pairs within the tolerance, and the rank correlation of predicted and measured order."""
    within = [p for p in pairs if p.error_of_extra is not None and abs(p.error_of_extra) <= TOLERANCE]
    lines = [f"{len(within)} of {len(pairs)} pairs: predicted extra time within {TOLERANCE:.0%} of the measured"]
    by_model: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_model.setdefault(pair.model, []).append(pair)
    for name, group in by_model.items():
        lines.append(f"rank order of {name}: {_rank(group)}")
    lines.append(f"rank order of all: {_rank(pairs)}")
    return "\n".join(lines)


def _rank(pairs: Sequence[Pair]) -> str:
    if len(pairs) < 2:
        return "one plan only"
    found = spearmanr([p.predicted_part for p in pairs], [p.measured_part for p in pairs]).statistic
    return f"{found:.2f} (Spearman, {len(pairs)} plans)"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser("predicted extra step time of plans against the measured one")
    parser.add_argument("--model", action="append", choices=list(models.CASES), help=f"default {', '.join(MODELS)}")
    parser.add_argument("--budget", action="append", help=f"as memory_budget takes it; default {', '.join(BUDGETS)}")
    parser.add_argument("--pairs", type=int, default=20, help="interleaved pairs of steps (default 20)")
    parser.add_argument("--device-file", metavar="FILE", help="figures to predict with; default: the setting `device`")
    parser.add_argument("--calibrate", type=float, metavar="SECONDS", help="calibrate first, for so long")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
