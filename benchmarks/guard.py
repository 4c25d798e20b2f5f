"""Inductor kept to the plan: measured peaks with and without the guard, and what the guard costs in step time.

    python -m benchmarks.guard [--device cuda] [--case heads] [--model bert] [--pairs 12] [--toy] [--json OUT]

Both copies of a model run the same plan; one is compiled by plain Inductor, the other without fusions and moves that
raise the peak. Part one trains four small models at their lowest plan, where fusions and moves do most harm. Part two
times the models of `max_speed` at `max`, in interleaved pairs: there the guard is not in force, and is put in force for
this. ok: the guarded peak is at most 1.03 of the predicted one and not above the unguarded one; the 95 % interval of the
median time ratio reaches 1.02 or below. The exit status is 1 on any miss.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import compile_remat
from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.harness import mib, ms
from benchmarks.common.timing import RatioInterval
from benchmarks.models import Case, joining
from compile_remat.backend import compile_graph
from compile_remat.config import RematConfig
from compile_remat.planning.partitioner import RematPartitioner

PEAK_LIMIT = 1.03
TIME_LIMIT = 1.02


class Guarded(RematPartitioner):
    """Under the guard whatever the budget is."""

    def __init__(self, *args: Any, guarded: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, guarded=True)


class Unguarded(RematPartitioner):
    """The same plans, compiled by plain Inductor."""

    def __init__(self, *args: Any, guarded: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, guarded=False)


@dataclass(frozen=True)
class PeakRow:
    """One model at its lowest plan: bytes."""

    case: str
    predicted_peak_bytes: int
    guarded_peak_bytes: int
    unguarded_peak_bytes: int

    @property
    def verdict(self) -> str:
        reasons = []
        if self.guarded_peak_bytes > PEAK_LIMIT * self.predicted_peak_bytes:
            reasons.append(f"above {PEAK_LIMIT} of the prediction")
        if self.guarded_peak_bytes > self.unguarded_peak_bytes:
            reasons.append("above the unguarded peak")
        return "miss: " + "; ".join(reasons) if reasons else "ok"


@dataclass(frozen=True)
class TimeRow:
    """One model at `max`: step times, guarded over unguarded."""

    model: str
    time: RatioInterval

    @property
    def verdict(self) -> str:
        return f"miss: time above {TIME_LIMIT}" if self.time.low > TIME_LIMIT else "ok"


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("Inductor kept to the plan")
    parser.add_argument("--case", action="append", choices=list(joining.CASES), help="of part one; default all four")
    parser.add_argument("--model", action="append", choices=list(models.CASES), help="of part two; default all five")
    parser.add_argument("--pairs", type=int, default=12, help="interleaved pairs of steps (default 12)")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    with private_compile_caches():
        peaks = [row_of_case(name, arguments) for name in arguments.case or joining.CASES]
        print(harness.ascii_table(*peak_table(peaks)) + "\n", flush=True)
        harness.write_json(arguments.json, head, peaks)
        times: list[TimeRow] = []
        for name in arguments.model or models.MAX_SPEED:
            times.append(row_of_model(name, arguments))
            harness.progress(f"{name}: {times[-1].time}")
            harness.write_json(arguments.json, head, [*peaks, *times])
        print(harness.ascii_table(*time_table(times)))
    return int(any(row.verdict != "ok" for row in [*peaks, *times]))


def trained(case: Case, partitioner_type: type[RematPartitioner], memory_budget: str) -> harness.Training:
    """The case under our backend, with the guard or without."""
    config = RematConfig(memory_budget=memory_budget)  # type: ignore[arg-type]

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, config, {}, partitioner_type)

    return harness.training(case, backend=backend)


def row_of_case(name: str, arguments: argparse.Namespace) -> PeakRow:
    harness.progress(f"{name}: compiling at min, guarded and unguarded")
    peaks, reports = [], []
    for partitioner_type in (Guarded, Unguarded):
        torch.compiler.reset()
        compile_remat.reset_reports()
        torch.manual_seed(arguments.seed)
        module, inputs = joining.CASES[name](harness.scale_of(arguments))
        on_device = tuple(value.to(arguments.device) for value in inputs)
        run = trained(Case(name, module.to(arguments.device), on_device, ""), partitioner_type, "min")
        run.clear_and_step()
        peaks.append(harness.second_step_peak(run, arguments.device).peak_bytes)
        reports += compile_remat.reports()
    guarded, unguarded = reports
    assert guarded.plan is not None and unguarded.plan is not None and guarded.plan.saved == unguarded.plan.saved
    return PeakRow(name, guarded.plan.peak_bytes, *peaks)


def row_of_model(name: str, arguments: argparse.Namespace) -> TimeRow:
    harness.progress(f"{name}: compiling at max, unguarded and guarded, and timing {arguments.pairs} pairs")
    torch.compiler.reset()
    device, scale, seed = arguments.device, harness.scale_of(arguments), arguments.seed
    cases = [models.build(name, device=device, scale=scale, seed=seed) for _ in range(2)]
    unguarded, guarded = trained(cases[0], Unguarded, "max"), trained(cases[1], Guarded, "max")
    return TimeRow(name, harness.compare(unguarded, guarded, pairs=arguments.pairs, device=device, seed=seed))


def peak_table(rows: Sequence[PeakRow]) -> tuple[list[str], list[list[str]]]:
    titles = ["case at min", "predicted MiB", "guarded MiB", "unguarded MiB", "guarded/predicted", "verdict"]
    cells = [
        [
            row.case,
            mib(row.predicted_peak_bytes),
            mib(row.guarded_peak_bytes),
            mib(row.unguarded_peak_bytes),
            f"{row.guarded_peak_bytes / row.predicted_peak_bytes:.3f}",
            row.verdict,
        ]
        for row in rows
    ]
    return titles, cells


def time_table(rows: Sequence[TimeRow]) -> tuple[list[str], list[list[str]]]:
    titles = ["model at max", "unguarded ms", "guarded ms", "time guarded/unguarded", "verdict"]
    cells = [
        [row.model, ms(row.time.median_a_ns), ms(row.time.median_b_ns), str(row.time), row.verdict] for row in rows
    ]
    return titles, cells


if __name__ == "__main__":
    sys.exit(main())
