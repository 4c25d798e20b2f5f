"""Distance of plans from the best plan: gap to the proven bound on full graphs, to the exact optimum on small copies.

    python -m benchmarks.gap [--part models] [--part unseen] [--part large] [--part exact] [--model unet] [--toy] [--json OUT]
    python -m benchmarks.gap --part zoo [--model dit] [--toy] [--json OUT]

Nothing is compiled. Each graph is planned for at 0.8, 0.6, 0.4 and 0.3 of the peak of its fastest plan; `gap` is the time
between plan and proven bound, as a part of the step's estimated time. The bound beside a plan is one that planning can afford;
here its programme gets more moments of the step. `floor` is the lowest peak found, `least` the proven one. `models` are those of
the other benchmarks, `unseen` six that the planner was not tuned on, `large` rows of transformer layers without a model.

`exact` cuts a small copy of nine models down to few free choices and simulates all its plans: plan, optimum and bound stand
side by side at budgets from the lowest peak of any plan to the one of the fastest. The exit status is 1 if a gap is more than
1 %, if a plan is more than 0.5 % of the step above its optimum, or if a lowest peak is more than 1 % above the lowest there is.

`zoo`, made alone, takes gaps of models of `benchmarks.zoo` apart (`benchmarks.zoo.gaps`); it needs their libraries.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import models
from benchmarks.common import harness, synthetic
from benchmarks.common.exact import cut_down, exact_front
from benchmarks.common.harness import mib, percent
from benchmarks.models.unseen import UNSEEN
from benchmarks.zoo import ENTRIES, gaps
from compile_remat.api import look
from compile_remat.passes import Plan, Planner, Problem, SearchOptions
from compile_remat.passes.search.bounds.moment_bound import MomentBound

BRANCHING = ("unet", "densenet", "encoder_decoder", "two_passes", "recurrent", "fourier", "experts")
CHAINS = ("gpt", "chain256")
LARGE: dict[str, Callable[[], Problem]] = {
    "30 equal layers": lambda: synthetic.equal_layers(30),
    "60 unequal layers": lambda: synthetic.unequal_layers(60, seed=2),
    "110 unequal layers": lambda: synthetic.unequal_layers(110, seed=3),
    "280 equal layers": lambda: synthetic.equal_layers(280),
    "570 unequal layers": lambda: synthetic.unequal_layers(570, seed=4),
}
"""Transformer-like graphs of 1,000 to 20,000 nodes."""

PARTS = ("models", "unseen", "large", "exact")
ZOO = "zoo"
FRACTIONS = (0.8, 0.6, 0.4, 0.3)
GAP_LIMIT = 0.01
OPTIMUM_LIMIT = 0.005
FLOOR_LIMIT = 0.01
"""The planner's lowest peak may exceed the lowest peak of all plans by this part."""

MORE_MOMENTS = SearchOptions(moment_rounds=8, moments_a_round=3, moment_gain=0.0, moment_excess=1.0, branch_values=0)
BRANCHES = replace(
    MORE_MOMENTS, moment_rounds=3, moments_a_round=2, branch_values=100_000, branch_rounds=4, branch_seconds=60.0
)
PROOFS = (0.002, MORE_MOMENTS), (GAP_LIMIT, BRANCHES)
"""A gap above each of these parts of the step is bounded again: with more moments, then with branches, which take longest."""

POINTS = 8
"""Budgets of a small copy, evenly from its lowest peak."""

FREE, TOY_FREE = 16, 12
"""Free choices of a small copy."""


@dataclass(frozen=True)
class GapRow:
    """One budget of one model.

    Attributes:
        kind: "gap" for a full graph, "exact" for a small copy.
        fastest_peak_bytes: Peak of the fastest plan.
        floor_bytes: The lowest peak that the planner reaches on a full graph; the lowest of all plans on a small copy.
        least_bytes: Proven lower bound on the peak of any plan.
        extra, bound, exact: Extra time of the plan, its proven lower bound, and that of the optimum: parts of the step's
            estimated time.
    """

    kind: str
    model: str
    budget_bytes: int
    fastest_peak_bytes: int
    floor_bytes: int
    least_bytes: int
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
    parser.add_argument(
        "--part",
        action="append",
        choices=(*PARTS, ZOO),
        help=f"may be repeated, {ZOO} is made alone; default all others",
    )
    parser.add_argument("--model", action="append", help="may be repeated")
    arguments = parser.parse_args(argv)
    if ZOO in (arguments.part or ()):
        return _zoo(parser, arguments)
    if unknown := sorted(set(arguments.model or ()) - set(models.CASES)):
        parser.error(f"no model is called {unknown[0]}; there are {', '.join(models.CASES)}")
    head = harness.header(arguments.device)
    harness.print_header(head)
    rows: list[GapRow] = []
    for part in arguments.part or PARTS:
        for found in PART_ROWS[part](arguments):
            rows += [replace(row, verdict=_verdict(row)) for row in found]
            harness.write_json(arguments.json, head, rows)
    for kind in dict.fromkeys(row.kind for row in rows):
        print(f"\n{kind}\n")
        of_kind = [row for row in rows if row.kind == kind]
        print(harness.ascii_table(*(exact_table(of_kind) if kind == "exact" else gap_table(of_kind))))
        print(summary(of_kind))
    return int(any(row.verdict.startswith("miss") for row in rows))


def _zoo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if set(arguments.part) != {ZOO}:
        parser.error(f"--part {ZOO} is made alone: its rows are of another kind")
    known = [entry.name for entry in ENTRIES]
    if unknown := sorted(set(arguments.model or ()) - set(known)):
        parser.error(f"no model of the zoo is called {unknown[0]}; there are {', '.join(known)}")
    return gaps.made(arguments)


def problem_of(name: str, arguments: argparse.Namespace, scale: float) -> Problem:
    """The planning problem of a model's first graph."""
    case = models.build(name, device=arguments.device, scale=scale, seed=arguments.seed)
    return look(case.module, case.inputs, for_budgets=True, memory_budget="max")[0].problem


def model_rows(arguments: argparse.Namespace) -> Iterator[list[GapRow]]:
    scale = harness.scale_of(arguments)
    for name in arguments.model or models.CASES:
        yield gap_rows("models", name, problem_of(name, arguments, scale))


def unseen_rows(arguments: argparse.Namespace) -> Iterator[list[GapRow]]:
    for name, build in UNSEEN.items():
        torch.manual_seed(arguments.seed)
        module, inputs = build(harness.scale_of(arguments))
        yield gap_rows("unseen", name, look(module.train(), inputs, memory_budget="max")[0].problem)


def large_rows(arguments: argparse.Namespace) -> Iterator[list[GapRow]]:
    for name in list(LARGE)[: 1 if arguments.toy else None]:
        yield gap_rows("large", name, LARGE[name]())


def small_copies(arguments: argparse.Namespace) -> Iterator[list[GapRow]]:
    for name in arguments.model or (*BRANCHING, *CHAINS):
        harness.progress(f"{name}: all plans of a small copy")
        small = problem_of(name, arguments, models.TOY_SCALE)
        yield exact_rows(name, cut_down(small, TOY_FREE if arguments.toy else FREE))


PART_ROWS: dict[str, Callable[[argparse.Namespace], Iterator[list[GapRow]]]] = {
    "models": model_rows,
    "unseen": unseen_rows,
    "large": large_rows,
    "exact": small_copies,
}


def gap_rows(kind: str, name: str, problem: Problem) -> list[GapRow]:
    """Plans at the fractions of the fastest plan's peak; below the floor the lowest one stands, over its budget."""
    harness.progress(f"{name}: planning")
    planner = Planner(problem)
    fastest, floor = planner.fastest().peak_bytes, planner.lowest().peak_bytes
    rows = [_row(kind, name, problem, int(fraction * fastest), fastest, floor) for fraction in FRACTIONS]
    return [row if not row.is_feasible else replace(row, bound=proven(problem, row)) for row in rows]


def proven(problem: Problem, row: GapRow) -> float:
    """The best of the plan's bound and the slower bounds of `PROOFS`, each tried only while the gap is still above its part."""
    search = Planner(problem).search
    bound = row.bound
    for gap, options in PROOFS if search.uses_moments else ():
        if row.extra - bound > gap:
            least_ns = MomentBound(search.simulator, search.pinned, options).proof(row.budget_bytes).least_time_ns
            bound = max(bound, (least_ns - search.fastest_time_ns) / max(1, problem.step_time_ns))
    return bound


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


def _row(kind: str, name: str, problem: Problem, budget_bytes: int, fastest: int, floor: int) -> GapRow:
    """A fresh planner, so that the time is that of one budget alone: CPU seconds of this process."""
    start = time.process_time()
    plan: Plan = Planner(problem).within(budget_bytes)
    seconds = time.process_time() - start
    extra, bound = (x / max(1, problem.step_time_ns) for x in (plan.extra_time_ns, plan.bound_time_ns))
    least, simulations = plan.least_peak_bytes, plan.simulations
    return GapRow(kind, name, budget_bytes, fastest, floor, least, plan.peak_bytes, extra, bound, simulations, seconds)


def _verdict(row: GapRow) -> str:
    if row.exact is not None:
        if not row.is_feasible:
            over = row.peak_bytes / row.budget_bytes - 1.0
            return f"{'floor' if over <= FLOOR_LIMIT else 'miss: floor'} {over:.2%} above the lowest of all plans"
        above = row.extra - row.exact
        return "ok" if above <= OPTIMUM_LIMIT else f"miss: {percent(above)} above the optimum"
    if not row.is_feasible:
        return "below the floor" if row.budget_bytes < row.floor_bytes else "miss: no plan"
    return "ok" if row.gap <= GAP_LIMIT else "miss: gap above 1%"


def summary(rows: Sequence[GapRow]) -> str:
    """One line for a table."""
    fitting = [row for row in rows if row.is_feasible]
    if not fitting:
        return "no budget above the floor"
    if rows[0].exact is not None:
        above = [row.extra - (row.exact or 0.0) for row in fitting]
        num_equal = sum(x <= 0.0 for x in above)
        close = sum(x <= OPTIMUM_LIMIT for x in above)
        return (
            f"of {len(rows)} budgets the plan is the fastest of all at {num_equal}, "
            f"within 0.5% of the step at {close}; worst {percent(max(above))}"
        )
    gaps = [row.gap for row in fitting]
    close = sum(gap <= GAP_LIMIT for gap in gaps)
    middle = percent(statistics.median(gaps))
    return f"{len(gaps)} budgets above the floor: gap within 1% at {close}, median {middle}, worst {percent(max(gaps))}"


def gap_table(rows: Sequence[GapRow]) -> tuple[list[str], list[list[str]]]:
    titles = [
        "model",
        "budget",
        "MiB",
        "floor",
        "least",
        "peak",
        "extra",
        "bound",
        "gap",
        "plans",
        "seconds",
        "verdict",
    ]
    cells = [
        [
            row.model,
            f"{row.budget_bytes / row.fastest_peak_bytes:.2f}",
            mib(row.budget_bytes),
            mib(row.floor_bytes),
            mib(row.least_bytes),
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
            f"{row.budget_bytes / row.fastest_peak_bytes:.3f}",
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
