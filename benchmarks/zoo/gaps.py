"""Gaps of plans for models that nobody tuned to, taken apart: the plan's part and the bound's part; ``--part zoo`` of `gap`.

Nothing is compiled, and no facts of a code generator are known.  Of each model, the graph that takes the most time is planned
for at fractions of its fastest plan's peak, and at the lowest peak.  Where the proven bound leaves more than `CLOSE` open, a
search of `TIMES` times the work is made: what it finds better than the plan is the *plan's part*, the rest the *bound's*.

`copy` are small copies of the same graphs, cut down to few free choices, of which all plans are simulated.  With so few choices
the planner does a branch and bound; the longer search's columns are those of the search without it.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.common import harness
from benchmarks.common.exact import cut_down, exact_front
from benchmarks.common.harness import mib, percent
from benchmarks.common.long_search import long_search
from benchmarks.common.torchvision_operators import declare_missing_operators
from benchmarks.pages.tables import Table
from benchmarks.zoo import entry_of
from compile_remat.api import look
from compile_remat.passes import Plan, Planner, Problem, SearchOptions
from compile_remat.passes.search.bounds.moment_bound import MomentBound

MODELS = (
    "conv_lstm", "radiance_field", "dit", "siren", "gin", "deepfm", "monai_unet", "bert", "t5", "convnext", "llama", "fnet",
    "schnet", "gradient_penalty", "ode_rk4", "patchtst", "attention_unet", "mlp_mixer", "resnet18", "vit", "edge_cnn", "diagonal",
    "mixtral",
)  # fmt: skip
"""Models of many families that are traced quickly; `--model` takes any other of the zoo."""

FRACTIONS = (0.8, 0.6, 0.4)
LOWEST, COPY = "min", "copy"
CLOSE, WORST = 0.01, 0.02
"""A plan's part is to be at most `CLOSE` of the step, or of the peak, on `ASKED` of the rows, and nowhere above `WORST`."""
ASKED = 0.95
TIMES = 20
MOMENTS = SearchOptions(moment_rounds=5, moments_a_round=3, moment_gain=0.0, moment_excess=1.0, branch_values=0)
"""For a tighter bound where the plan's own leaves more than `CLOSE` open."""
FREE, POINTS = 14, 4
"""Free choices of a small copy, and its budgets, evenly from its lowest peak."""
UNBRANCHED = SearchOptions(branch_values=0)


@dataclass(frozen=True)
class PartsRow:
    """One graph at one setting.

    Attributes:
        setting: A fraction of the fastest plan's peak, `LOWEST`, or `COPY` with the number of a budget.
        budget_bytes: The budget; the plan's own peak at the lowest peak.
        least_bytes: No plan's peak is below.
        extra, bound, better: Extra time of the plan, its proven lower bound (the optimum's, of a small copy), and the extra time
            of the plan that the longer search found (of a copy, the search without branch and bound): parts of the step's time.
        better_peak_bytes: Peak of that plan.  None, like `better`, if no longer search was made.
        simulations, planning_s, long_s: Plans tried, and CPU seconds, of the search and of the longer one.
    """

    model: str
    setting: str
    budget_bytes: int
    fastest_peak_bytes: int
    least_bytes: int
    peak_bytes: int
    extra: float
    bound: float
    simulations: int
    planning_s: float
    better: float | None = None
    better_peak_bytes: int | None = None
    long_s: float | None = None
    verdict: str = ""

    @property
    def is_copy(self) -> bool:
        return self.setting.startswith(COPY)

    @property
    def is_lowest(self) -> bool:
        return self.setting == LOWEST

    @property
    def is_feasible(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    @property
    def gap(self) -> float:
        """The part that the bound leaves open: of the step's time, or of the plan's peak at the lowest peak."""
        return (self.peak_bytes - self.least_bytes) / self.peak_bytes if self.is_lowest else self.extra - self.bound

    @property
    def plan_part(self) -> float:
        """The part of `gap` that a better plan closes: a copy's optimum, or the one of the longer search; 0 if there was none."""
        if self.is_copy:
            return max(0.0, self.gap)
        if self.better is None or self.better_peak_bytes is None:
            return 0.0
        found = (
            (self.peak_bytes - self.better_peak_bytes) / self.peak_bytes if self.is_lowest else self.extra - self.better
        )
        return max(0.0, found)

    @property
    def bound_part(self) -> float:
        return self.gap - self.plan_part


# -- rows -------------------------------------------------------------------------------------------------------------


def rows_of_models(names: Sequence[str], seed: int, toy: bool) -> Iterator[list[PartsRow]]:
    """The rows of each model, one model after the other."""
    declare_missing_operators()
    for name in names:
        harness.progress(f"{name}: tracing")
        problem = problem_of(name, seed)
        times = 2 if toy else TIMES
        yield [_judged(row) for row in (*full_rows(name, problem, times), *copy_rows(name, cut_down(problem, FREE)))]


def problem_of(name: str, seed: int) -> Problem:
    """The problem of the model's graph that takes the most time."""
    torch.manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):  # warnings of the libraries
        module, inputs = entry_of(name).build()
        found = look(module.train(), inputs, for_budgets=True, memory_budget="max")
    return max((planned.problem for planned in found), key=lambda problem: problem.step_time_ns)


def full_rows(name: str, problem: Problem, times: int = TIMES) -> Iterator[PartsRow]:
    """The whole graph at each budget above its lowest peak, and there."""
    planner = Planner(problem)
    lowest = _row(name, LOWEST, problem, planner, None)
    fastest_peak_bytes = planner.fastest().peak_bytes
    for fraction in FRACTIONS:
        if fraction * fastest_peak_bytes >= lowest[0].peak_bytes:
            harness.progress(f"{name}: {fraction}")
            row, plan = _row(name, str(fraction), problem, Planner(problem), int(fraction * fastest_peak_bytes))
            yield _searched(_bounded(row, problem), problem, plan, times)
    harness.progress(f"{name}: {LOWEST}")
    yield _searched(lowest[0], problem, lowest[1], times)


def copy_rows(name: str, problem: Problem) -> Iterator[PartsRow]:
    """Plans beside the optimum, of a problem with few free choices."""
    harness.progress(f"{name}: all plans of a small copy")
    front, step_ns = exact_front(problem), max(1, problem.step_time_ns)
    low, high = int(front.peaks[0]), int(front.peaks[-1])
    for k, budget_bytes in enumerate(sorted({low + (high - low) * k // POINTS for k in range(POINTS)})):
        best_ns = front.fastest_ns(budget_bytes)
        assert best_ns is not None  # the lowest peak of all plans fits every budget here
        row, _ = _row(name, f"{COPY} {k}", problem, Planner(problem), budget_bytes)
        start = time.process_time()
        plain = Planner(problem, options=UNBRANCHED).within(budget_bytes)
        yield replace(
            row,
            bound=(best_ns - int(front.times[-1])) / step_ns,
            least_bytes=low,
            better=plain.extra_time_ns / step_ns,
            better_peak_bytes=plain.peak_bytes,
            long_s=time.process_time() - start,
        )


def _row(
    name: str, setting: str, problem: Problem, planner: Planner, budget_bytes: int | None
) -> tuple[PartsRow, Plan]:
    start = time.process_time()
    plan = planner.lowest() if budget_bytes is None else planner.within(budget_bytes)
    seconds, step_ns = time.process_time() - start, max(1, problem.step_time_ns)
    row = PartsRow(
        model=name,
        setting=setting,
        budget_bytes=plan.peak_bytes if budget_bytes is None else budget_bytes,
        fastest_peak_bytes=planner.fastest().peak_bytes,
        least_bytes=plan.least_peak_bytes,
        peak_bytes=plan.peak_bytes,
        extra=plan.extra_time_ns / step_ns,
        bound=plan.bound_time_ns / step_ns,
        simulations=plan.simulations,
        planning_s=seconds,
    )
    return row, plan


def _bounded(row: PartsRow, problem: Problem) -> PartsRow:
    """The row with a tighter bound, if its own leaves more than `CLOSE` open."""
    search = Planner(problem).search
    if row.gap <= CLOSE or not search.uses_moments:
        return row
    least_ns = MomentBound(search.simulator, search.pinned, MOMENTS).proof(row.budget_bytes).least_time_ns
    return replace(row, bound=max(row.bound, (least_ns - search.fastest_time_ns) / max(1, problem.step_time_ns)))


def _searched(row: PartsRow, problem: Problem, plan: Plan, times: int) -> PartsRow:
    """The row with the figures of the longer search, if more than `CLOSE` is open."""
    if row.gap <= CLOSE or not row.is_feasible:
        return row
    start = time.process_time()
    found = long_search(problem, plan, times)
    better_ns = found.time_ns - Planner(problem).fastest_time_ns
    return replace(
        row,
        better=better_ns / max(1, problem.step_time_ns),
        better_peak_bytes=found.peak_bytes,
        long_s=time.process_time() - start,
    )


def _judged(row: PartsRow) -> PartsRow:
    if not row.is_feasible:
        over = row.peak_bytes / row.budget_bytes - 1
        return replace(row, verdict=f"{'floor' if over <= CLOSE else 'miss: floor'} {over:.2%} above the lowest")
    unit = "of the peak" if row.is_lowest else "of the step"
    return replace(row, verdict="ok" if row.plan_part <= CLOSE else f"miss: {row.plan_part:.1%} {unit} is the plan's")


# -- rows as text -----------------------------------------------------------------------------------------------------


def table(rows: Sequence[PartsRow]) -> Table:
    """A line for each whole graph and setting."""
    titles = (
        "model", "budget", "MiB", "least", "peak", "extra", "bound", "gap", "plan's part", "bound's part", "seconds", "20 times",
        "verdict",
    )  # fmt: skip
    return titles, [_cells(row) for row in rows if not row.is_copy]


def _cells(row: PartsRow) -> list[str]:
    return [
        row.model,
        row.setting,
        mib(row.budget_bytes),
        mib(row.least_bytes),
        mib(row.peak_bytes),
        percent(row.extra),
        "-" if row.is_lowest else percent(row.bound),
        *(percent(x) for x in (row.gap, row.plan_part, row.bound_part)),
        f"{row.planning_s:.1f}",
        "-" if row.long_s is None else f"{row.long_s:.0f}",
        row.verdict,
    ]


def summary(rows: Sequence[PartsRow]) -> str:
    """A line for the budgets, the lowest peaks, and the small copies."""
    full = [row for row in rows if not row.is_copy and not row.is_lowest and row.is_feasible]
    lowest = [row for row in rows if row.is_lowest]
    copies = [row for row in rows if row.is_copy]
    num_models = len({row.model for row in rows})
    lines = [f"{num_models} models; a plan's part is asked to be at most 1% on 95% of rows, 2% at worst"]
    for name, some in (("budgets", full), ("lowest peaks", lowest)):
        if some:
            gaps, parts = [row.gap for row in some], [row.plan_part for row in some]
            lines.append(
                f"{name}: {len(some)} rows; gap within 1% at {_share(gaps)}, median {percent(statistics.median(gaps))}, worst "
                f"{percent(max(gaps))}; plan's part within 1% at {_share(parts)}, worst {percent(max(parts))}; "
                f"bound's part at worst {percent(max(row.bound_part for row in some))}"
            )
    fitting = [row for row in copies if row.is_feasible]
    if fitting:
        parts = [row.plan_part for row in fitting]
        without = [
            (row.better or 0.0) - row.bound for row in fitting if (row.better_peak_bytes or 0) <= row.budget_bytes
        ]
        lines.append(
            f"copies: {len(copies)} rows, {len(fitting)} with a plan; the optimum at {sum(x <= 0 for x in parts)}, within 1% at "
            f"{_share(parts)}, worst {percent(max(parts))}; without branch and bound {len(without)} with a plan, within 1% at "
            f"{_share(without)}, worst {percent(max(without, default=0.0))}"
        )
    return "\n".join(lines)


def _share(values: Sequence[float]) -> str:
    close = sum(value <= CLOSE for value in values)
    return f"{close} ({close / max(1, len(values)):.0%})"


def made(arguments: argparse.Namespace) -> int:
    """Makes and prints the rows of ``benchmarks.gap --part zoo``; 1 if the parts of the plans are above what is asked.

    Models whose rows the file of `--json` has already are not made again.
    """
    head, rows = harness.stored_rows(
        arguments.json, harness.header(arguments.device), lambda fields: PartsRow(**fields)
    )
    harness.print_header(head)
    known = {row.model for row in rows}
    left = [name for name in arguments.model or MODELS if name not in known]
    for found in rows_of_models(left, arguments.seed, arguments.toy):
        rows += found
        harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(*table(rows)), end="\n\n")
    print(summary(rows))
    parts = [row.plan_part for row in rows if row.is_feasible]
    return int(max(parts) > WORST or sum(part <= CLOSE for part in parts) < ASKED * len(parts))
