"""The price of `inputs="as_plain"`: floors and extra time beside those of `constant`, and the copies of inputs that plans save.

    python -m benchmarks.inputs [--model gpt] [--toy] [--json OUT]

Nothing is compiled. Each model is planned for under both values of the setting: for the lowest peak, and for 0.6 and 0.4 of the
predicted peak of plain torch.compile. `cost` is the peak at the floor, or the extra time as a part of the step, less that of
`constant`; `copies` are what the plan of `as_plain` saves in place of inputs: their number, bytes, and estimated time as a part of
the step. `planning` is the planning time over that of `constant`, in CPU seconds of this process. The exit status is 1 if a floor
is more than 7 % higher, if the median over all models is above 0 or a benchmark model's floor more than 3 % higher, or if a plan
takes more than 1 % of the step more.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.harness import percent
from benchmarks.models.building import Built
from benchmarks.models.frozen import FROZEN
from compile_remat.api import look
from compile_remat.passes import Plan, Planner, Problem

SHARES = (0.6, 0.4)
FLOOR_LIMIT, BENCHMARK_FLOOR_LIMIT, TIME_LIMIT = 0.07, 0.03, 0.01
TITLES = ("model", "floor", "cost", "copies", "0.6", "cost", "copies", "0.4", "cost", "copies", "planning")


@dataclass(frozen=True)
class InputsRow:
    """One budget of one model under one value of the setting.

    Attributes:
        budget: "min" or a share of plain's peak.
        extra: Extra time of the plan, a part of the step's estimated time.
        copies: Number of copies of inputs that the plan saves.
        copied_bytes: Bytes of these copies.
        copy_time: Estimated time of making these copies, a part of the step's.
        planning_s: CPU seconds from the joint graph to this plan.
    """

    model: str
    inputs: str
    budget: str
    peak_bytes: int
    is_kept: bool
    extra: float
    copies: int
    copied_bytes: int
    copy_time: float
    planning_s: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(_builders()), help="may be repeated; default all")
    parser.add_argument("--toy", action="store_true", help="tiny models: checks the command, not the claims")
    parser.add_argument("--json", metavar="OUT", type=harness.Path, help="also write everything to this file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(2)  # workspaces of kernels depend on it
    head = harness.header("cpu")
    harness.print_header(head)
    rows = list[InputsRow]()
    for name in arguments.model or _builders():
        harness.progress(name)
        rows += rows_of(name, harness.scale_of(arguments))
        harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(TITLES, table(rows)))
    found = misses(rows)
    print("\n".join(found) or "all within what was asked")
    return int(bool(found))


def _builders() -> dict[str, Callable[[float], Built]]:
    return {**models.CASES, **FROZEN}


def rows_of(name: str, scale: float) -> list[InputsRow]:
    """The six rows of a model."""
    torch.manual_seed(0)
    module, inputs = _builders()[name](scale)
    found = list[InputsRow]()
    for value in ("constant", "as_plain"):
        start = time.process_time()
        (planned,) = look(
            module, inputs, for_budgets=True, memory_budget="max", device="cpu", capacity="100GiB", inputs=value
        )
        building_s = time.process_time() - start
        assert planned.report.plain is not None
        plain_bytes = planned.report.plain.peak_bytes
        for budget in ("min", *SHARES):
            start = time.process_time()
            planner = Planner(planned.problem)
            plan = planner.lowest() if budget == "min" else planner.within(int(float(budget) * plain_bytes))
            seconds = building_s + time.process_time() - start
            found.append(_row(name, value, str(budget), planned.problem, plan, seconds))
    return found


def _row(name: str, value: str, budget: str, problem: Problem, plan: Plan, seconds: float) -> InputsRow:
    saved = frozenset(plan.saved)
    copies = [v for v in problem.values if v.is_snapshot and v.name in saved]
    step_ns = max(1, problem.step_time_ns)
    return InputsRow(
        name,
        value,
        budget,
        plan.peak_bytes,
        plan.is_feasible,
        plan.extra_time_ns / step_ns,
        len(copies),
        sum(v.nbytes for v in copies),
        sum(v.save_time_ns for v in copies) / step_ns,
        seconds,
    )


def floor_costs(rows: Sequence[InputsRow]) -> dict[str, float]:
    """For each model, how much higher its floor is, as a part of that under `constant`."""
    floors = {(row.model, row.inputs): row.peak_bytes for row in rows if row.budget == "min"}
    names = dict.fromkeys(row.model for row in rows)
    return {name: floors[name, "as_plain"] / floors[name, "constant"] - 1 for name in names}


def time_costs(rows: Sequence[InputsRow]) -> dict[tuple[str, str], float]:
    """For each model and share that both values keep, the extra time less that under `constant`, a part of the step."""
    kept = {(row.model, row.inputs, row.budget): row.extra for row in rows if row.budget != "min" and row.is_kept}
    pairs = {(name, budget) for name, _, budget in kept}
    return {
        pair: kept[pair[0], "as_plain", pair[1]] - kept[pair[0], "constant", pair[1]]
        for pair in sorted(pairs)
        if {(pair[0], value, pair[1]) for value in ("as_plain", "constant")} <= kept.keys()
    }


def misses(rows: Sequence[InputsRow]) -> list[str]:
    """Returns a line for each figure that is worse than asked."""
    floors, found = floor_costs(rows), list[str]()
    for name, cost in floors.items():
        limit = BENCHMARK_FLOOR_LIMIT if name in models.CASES else FLOOR_LIMIT
        if cost > limit:
            found.append(f"{name}: the floor is {percent(cost)} higher, asked at most {percent(limit)}")
    if round(statistics.median(floors.values()), 4) > 0:
        found.append(f"the median floor is {statistics.median(floors.values()):.2%} higher, asked 0")
    for (name, budget), cost in time_costs(rows).items():
        if cost > TIME_LIMIT:
            found.append(f"{name} at {budget}: {percent(cost)} of the step more, asked at most {percent(TIME_LIMIT)}")
    return found


def table(rows: Sequence[InputsRow]) -> list[list[str]]:
    """Cells, a line for each model."""
    floors, times = floor_costs(rows), time_costs(rows)
    by_key = {(row.model, row.inputs, row.budget): row for row in rows}
    lines = list[list[str]]()
    for name, cost in floors.items():
        line = [name]
        for budget in ("min", *map(str, SHARES)):
            row = by_key[name, "as_plain", budget]
            line.append(
                harness.mib(row.peak_bytes) if budget == "min" else percent(row.extra) if row.is_kept else "floor"
            )
            change = cost if budget == "min" else times.get((name, budget))
            line.append("-" if change is None else f"{change:+.2%}")
            line.append(f"{row.copies}: {row.copied_bytes / 2**20:.2f} MiB, {row.copy_time:.2%}" if row.copies else "-")
        ratios = [
            by_key[name, "as_plain", b].planning_s / max(1e-9, by_key[name, "constant", b].planning_s)
            for b in ("min", *map(str, SHARES))
        ]
        lines.append([*line, f"{statistics.median(ratios):.2f}"])
    return lines


if __name__ == "__main__":
    sys.exit(main())
