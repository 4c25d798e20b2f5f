"""`max` against plain torch.compile on five models of different kinds: peak ratio and interleaved step times.

    python -m benchmarks.max_speed [--device cuda] [--model bert] [--pairs 30] [--toy] [--json OUT]

Three compiled copies with the same weights live in one process: plain, plain again, and ours. The ratio ours/plain
stands beside the A/A ratio (plain again / plain), which shows what this machine's noise does. ok: peak at most 1.001
of plain's, and the 95 % interval of the median time ratio reaches 1.02 or below. The exit status is 1 on any miss.
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

PEAK_LIMIT = 1.001
TIME_LIMIT = 1.02


@dataclass(frozen=True)
class MaxRow:
    """One model: peaks in bytes, and the two time ratios."""

    model: str
    plain_peak_bytes: int
    peak_bytes: int
    time: RatioInterval
    same: RatioInterval

    @property
    def verdict(self) -> str:
        reasons = []
        if self.peak_bytes > PEAK_LIMIT * self.plain_peak_bytes:
            reasons.append(f"peak above {PEAK_LIMIT}")
        if self.time.low > TIME_LIMIT:
            reasons.append(f"time above {TIME_LIMIT}")
        return "miss: " + "; ".join(reasons) if reasons else "ok"


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("`max` against plain torch.compile")
    parser.add_argument(
        "--model", action="append", choices=list(models.CASES), help="may be repeated; default all five"
    )
    parser.add_argument("--pairs", type=int, default=30, help="interleaved pairs of steps (default 30)")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    with private_compile_caches():
        rows = [row_of_model(name, arguments) for name in arguments.model or models.MAX_SPEED]
    print(harness.ascii_table(*table(rows)))
    harness.write_json(arguments.json, head, rows)
    return int(any(row.verdict != "ok" for row in rows))


def row_of_model(name: str, arguments: argparse.Namespace) -> MaxRow:
    harness.progress(f"{name}: compiling plain, plain again, max")
    torch.compiler.reset()
    device, scale, seed = arguments.device, harness.scale_of(arguments), arguments.seed
    cases = [models.build(name, device=device, scale=scale, seed=seed) for _ in range(3)]
    plain, again, ours = harness.plain(cases[0]), harness.plain_again(cases[1]), harness.remat(cases[2], "max")
    for run in (plain, again, ours):
        run.clear_and_step()
        run.clear()
    plain_peak, peak = (harness.second_step_peak(run, device).peak_bytes for run in (plain, ours))
    harness.progress(f"{name}: timing {arguments.pairs} pairs, twice")
    time = harness.compare(plain, ours, pairs=arguments.pairs, device=device, seed=seed)
    same = harness.compare(plain, again, pairs=arguments.pairs, device=device, seed=seed + 1)
    return MaxRow(name, plain_peak, peak, time, same)


def table(rows: Sequence[MaxRow]) -> tuple[list[str], list[list[str]]]:
    titles = ["model", "plain MiB", "max MiB", "ratio", "plain ms", "time max/plain", "time plain/plain", "verdict"]
    cells = [
        [
            row.model,
            mib(row.plain_peak_bytes),
            mib(row.peak_bytes),
            f"{row.peak_bytes / row.plain_peak_bytes:.4f}",
            ms(row.time.median_a_ns),
            str(row.time),
            str(row.same),
            row.verdict,
        ]
        for row in rows
    ]
    return titles, cells


if __name__ == "__main__":
    sys.exit(main())
