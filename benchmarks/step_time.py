"""Step time inside a budget against plain torch.compile, interleaved in one process.

    python -m benchmarks.step_time [--model gpt] [--budget 90MiB] [--limit 1.15] [--pairs 30] [--device cuda]

ok: the median of the interleaved time ratios ours/plain is at most the limit, and the measured peak lies inside the
budget. The exit status is 1 otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.harness import mib, ms
from benchmarks.common.timing import RatioInterval


@dataclass(frozen=True)
class StepTimeRow:
    """One model at one budget."""

    model: str
    budget: str
    budget_bytes: int
    plain_peak_bytes: int
    peak_bytes: int
    time: RatioInterval
    same: RatioInterval
    verdict: str


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    with private_compile_caches():
        row = measure_row(arguments)
    print(harness.ascii_table(*table([row])))
    harness.write_json(arguments.json, head, [row])
    return int(row.verdict != "ok")


def table(rows: Sequence[StepTimeRow]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells."""
    titles = ["model", "budget", "plain MiB", "peak MiB", "plain ms", "ours ms", "ours/plain", "plain/plain", "verdict"]
    cells = [
        [row.model, row.budget, mib(row.plain_peak_bytes), mib(row.peak_bytes), ms(row.time.median_a_ns),
         ms(row.time.median_b_ns), str(row.time), str(row.same), row.verdict]
        for row in rows
    ]  # fmt: skip
    return titles, cells


def measure_row(arguments: argparse.Namespace) -> StepTimeRow:
    torch.compiler.reset()
    device, scale, seed = arguments.device, harness.scale_of(arguments), arguments.seed
    cases = [models.build(arguments.model, device=device, scale=scale, seed=seed) for _ in range(3)]
    harness.progress(f"{arguments.model}: compiling plain, plain again, {arguments.budget}")
    plain, again = harness.plain(cases[0]), harness.plain_again(cases[1])
    for run in (plain, again):
        run.clear_and_step()
    plain_peak = harness.second_step_peak(plain, device).peak_bytes
    budget = int(0.6 * plain_peak) if arguments.toy else arguments.budget
    ours = harness.remat(cases[2], budget)
    ours.clear_and_step()
    peak = harness.second_step_peak(ours, device).peak_bytes
    budget_bytes = _budget_in_force()
    harness.progress(f"{arguments.model}: timing {arguments.pairs} pairs, twice")
    time = harness.compare(plain, ours, pairs=arguments.pairs, device=device, seed=seed)
    same = harness.compare(plain, again, pairs=arguments.pairs, device=device, seed=seed + 1)
    verdict = _verdict(peak, budget_bytes, time, arguments.limit)
    return StepTimeRow(arguments.model, str(budget), budget_bytes, plain_peak, peak, time, same, verdict)


def _budget_in_force() -> int:
    """The budget in bytes as the backend read it; `min` and `max` have none, then its predicted peak."""
    import compile_remat

    report = compile_remat.reports()[-1]
    return int(report.predicted_peak_bytes if report.budget_bytes is None else report.budget_bytes)


def _verdict(peak: int, budget_bytes: int, time: RatioInterval, limit: float) -> str:
    reasons = []
    if peak > budget_bytes:
        reasons.append("over budget")
    if time.median > limit:
        reasons.append(f"time above {limit:g}")
    return "miss: " + "; ".join(reasons) if reasons else "ok"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser("step time inside a budget against plain torch.compile")
    parser.add_argument("--model", default="gpt", choices=list(models.CASES))
    parser.add_argument(
        "--budget", default="90MiB", help="as memory_budget takes it (default 90MiB; --toy takes 0.6 of plain)"
    )
    parser.add_argument("--limit", type=float, default=1.15, help="highest allowed median ratio (default 1.15)")
    parser.add_argument("--pairs", type=int, default=30)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
