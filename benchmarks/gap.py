"""How far from the best can a plan be: gap to the proven bound on full graphs, to the exact optimum on small copies.

    python -m benchmarks.gap [--model unet] [--exact] [--toy] [--json OUT]

Nothing is compiled. Each model is planned for at 0.6, 0.4 and 0.3 of the predicted peak of the set that torch's own
partitioner saves; `gap` is the time between plan and proven bound, as a part of the step's estimated time. A bound can be
loose: where the gap is above 3 % (everywhere with --exact), a small copy of the model is cut down to few free choices, all its
plans are simulated, and plan, optimum and bound stand side by side at budgets from the lowest peak of any plan to the one of
the fastest. The exit status is 1 if a plan is more than 3 % of the step above its optimum, above its bound where the bound
of the small copy is not as loose, or if a lowest peak is more than 1 % above the lowest there is.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.exact import cut_down, exact_front
from benchmarks.common.harness import mib, percent
from compile_remat.api import look
from compile_remat.passes import Planner, Problem

BRANCHING = ("unet", "densenet", "encoder_decoder", "two_passes", "recurrent", "fourier", "experts")
CHAINS = ("gpt", "chain256")
FRACTIONS = (0.6, 0.4, 0.3)
GAP_LIMIT = 0.03
FLOOR_LIMIT = 0.01
"""How far above the lowest peak of all plans the planner's may end."""

POINTS = 8
"""Budgets of a small copy, evenly from its lowest peak."""

FREE, TOY_FREE = 16, 12
"""Free choices of a small copy."""


@dataclass(frozen=True)
class GapRow:
    """One budget of one model.

    Attributes:
        kind: "gap" for a full graph, "exact" for a small copy.
        default_peak_bytes: Of torch's own saved set on a full graph; of the fastest plan on a small copy.
        floor_bytes: The lowest peak that the planner reaches on a full graph; the lowest of all plans on a small copy.
        extra, bound, exact: Of the plan, proven, and of the fastest plan there is: parts of the step's estimated time.
    """

    kind: str
    model: str
    budget_bytes: int
    default_peak_bytes: int
    floor_bytes: int
    peak_bytes: int
    extra: float
    bound: float
    simulations: int
    planning_s: float
    exact: float | None = None
    verdict: str = ""

    @property
    def gap(self) -> float:
        return self.extra - self.bound

    @property
    def is_feasible(self) -> bool:
        return self.peak_bytes <= self.budget_bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("gap between plans and their proven bounds, or the exact optimum")
    parser.add_argument("--model", action="append", choices=list(models.CASES), help="may be repeated")
    parser.add_argument("--exact", action="store_true", help="small copies of all models, not just of those with a gap")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    rows: list[GapRow] = []
    for name in arguments.model or (*BRANCHING, *CHAINS):
        harness.progress(f"{name}: planning")
        found = gap_rows(name, problem_of(name, arguments, harness.scale_of(arguments)))
        is_wide = any(row.is_feasible and row.gap > GAP_LIMIT for row in found)
        if arguments.exact or is_wide:
            harness.progress(f"{name}: all plans of a small copy")
            small = problem_of(name, arguments, models.TOY_SCALE)
            found += exact_rows(name, cut_down(small, TOY_FREE if arguments.toy else FREE))
        rows += judge(found)
    print(harness.ascii_table(*gap_table([row for row in rows if row.kind == "gap"])))
    if any(row.kind == "exact" for row in rows):
        print("\nsmall copies, all plans simulated\n")
        print(harness.ascii_table(*exact_table([row for row in rows if row.kind == "exact"])))
    harness.write_json(arguments.json, head, rows)
    return int(any(row.verdict.startswith("miss") for row in rows))


def problem_of(name: str, arguments: argparse.Namespace, scale: float) -> Problem:
    """The planning problem of a model's first graph, with what torch's own partitioner saves."""
    case = models.build(name, device=arguments.device, scale=scale, seed=arguments.seed)
    return look(case.module, case.inputs, memory_budget="max")[0].problem


def gap_rows(name: str, problem: Problem) -> list[GapRow]:
    """Plans at the fractions of the default peak; below the floor the lowest one stands, over its budget."""
    planner = Planner(problem)
    default = planner.torch_default(None).peak_bytes
    floor = planner.lowest().peak_bytes
    return [_row("gap", name, problem, int(fraction * default), default, floor) for fraction in FRACTIONS]


def exact_rows(name: str, problem: Problem) -> list[GapRow]:
    """Plans beside the optimum, of a problem with few free choices."""
    front = exact_front(problem)
    low, high = int(front.peaks[0]), int(front.peaks[-1])
    rows = []
    for budget_bytes in sorted({low + (high - low) * k // POINTS for k in range(POINTS)}):
        best = front.fastest_ns(budget_bytes)
        assert best is not None  # the lowest peak of all plans fits every budget here
        row = _row("exact", name, problem, budget_bytes, high, low)
        rows.append(replace(row, exact=(best - int(front.times[-1])) / max(1, problem.step_time_ns)))
    return rows


def _row(kind: str, name: str, problem: Problem, budget_bytes: int, default: int, floor: int) -> GapRow:
    """A fresh planner, so that the time is that of one budget alone."""
    start = time.perf_counter()
    plan = Planner(problem).within(budget_bytes)
    seconds = time.perf_counter() - start
    extra, bound = (x / max(1, problem.step_time_ns) for x in (plan.extra_time_ns, plan.bound_time_ns))
    return GapRow(kind, name, budget_bytes, default, floor, plan.peak_bytes, extra, bound, plan.simulations, seconds)


def judge(rows: Sequence[GapRow]) -> list[GapRow]:
    """The rows of one model with their verdicts."""
    slack = max((row.exact - row.bound for row in rows if row.exact is not None and row.is_feasible), default=0.0)
    return [replace(row, verdict=_verdict(row, slack)) for row in rows]


def _verdict(row: GapRow, slack: float) -> str:
    """`slack` is how far the bound of the small copy lies below the optimum."""
    if row.exact is not None:
        if not row.is_feasible:
            over = row.peak_bytes / row.budget_bytes - 1.0
            return f"{'floor' if over <= FLOOR_LIMIT else 'miss: floor'} {over:.2%} above the lowest of all plans"
        return (
            "ok" if row.extra - row.exact <= GAP_LIMIT else f"miss: {percent(row.extra - row.exact)} above the optimum"
        )
    if not row.is_feasible:
        return "below the floor" if row.budget_bytes < row.floor_bytes else "miss: no plan"
    if row.gap <= GAP_LIMIT:
        return "ok"
    if row.gap <= slack:
        return f"ok: on the small copy the optimum lies {percent(slack)} above the bound"
    return "miss: gap above 3%"


def gap_table(rows: Sequence[GapRow]) -> tuple[list[str], list[list[str]]]:
    titles = ["model", "budget", "MiB", "floor", "peak", "extra", "bound", "gap", "plans", "seconds", "verdict"]
    cells = [
        [
            row.model,
            f"{row.budget_bytes / row.default_peak_bytes:.2f}",
            mib(row.budget_bytes),
            mib(row.floor_bytes),
            mib(row.peak_bytes),
            *((percent(x) for x in (row.extra, row.bound, row.gap)) if row.is_feasible else "---"),
            str(row.simulations),
            f"{row.planning_s:.2f}",
            row.verdict,
        ]
        for row in rows
    ]
    return titles, cells


def exact_table(rows: Sequence[GapRow]) -> tuple[list[str], list[list[str]]]:
    titles = ["model", "budget", "plan", "optimum", "bound", "plan-optimum", "verdict"]
    cells = [
        [
            row.model,
            f"{row.budget_bytes / row.default_peak_bytes:.3f}",
            percent(row.extra),
            percent(row.exact),
            percent(row.bound),
            percent(row.extra - (row.exact or 0.0)),
            row.verdict,
        ]
        for row in rows
    ]
    return titles, cells


if __name__ == "__main__":
    sys.exit(main())
