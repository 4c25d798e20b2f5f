"""CPU time of planning, between the joint graph and two modules, beside torch's own partitioner on the same graph.

    python -m benchmarks.planning_time [--model gpt] [--repeats 5] [--points 20] [--phases] [--toy] [--json OUT]

Each model is traced once.  On copies of its joint graph torch's partitioner (`activation_memory_budget` 0.5), ours at 0.5 and ours
at `min` take turns; the figures are the lowest CPU seconds of each over the repeats.  Ours at 0.5 includes finding the plain peak
that the fraction is of.  The workspaces of library kernels are measured once on a machine and kept on disk: the first turn, which
may measure, does not count.

Python's collector is off in all of them.  Ours pauses it anyway; torch's partitioner has it on, and whether that meets a full
collection, a quarter to two fifths of its time, depends on what the process did before.  So would it depend on the depth of the
call whether torch's loops run into `frames_in_one_chunk`'s case, which ours avoids anyway: all of them are in one chunk here.

`frontier` is the time of that many plans together (`compile_remat.pareto`), as a multiple of one search at half of the fastest
plan's peak on the same problem.

`--phases` adds what ours at 0.5 takes in each of its phases, the least of further turns.  Three of them are functions of torch's
own partitioner that both call.
"""

import argparse
import copy
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.phases import phases_timed
from benchmarks.common.timing import cpu_seconds
from benchmarks.common.torch_budget import torch_activation_budget
from compile_remat._torch import joint_graph
from compile_remat._torch.isolated_trace import trace_isolated
from compile_remat._util.collector import collector_paused
from compile_remat._util.frame_chunk import frames_in_one_chunk
from compile_remat.config import RematConfig
from compile_remat.inductor.peek import look_at_joint_graph
from compile_remat.partitioning import joint_split
from compile_remat.partitioning.joint_split import split
from compile_remat.passes import Planner, Problem, ProblemBuilder, curves
from compile_remat.passes.graph import build
from compile_remat.planning import joint_planning, joint_problem
from compile_remat.planning.joint_problem import JointModule
from compile_remat.planning.pipeline import plan_graph
from compile_remat.planning.plain_peaks import forget_plain_peaks
from compile_remat.planning.request import Fit
from compile_remat.planning.settings import settings_for

TORCH_BUDGET = 0.5
SETTINGS = (0.5, "min")
SEARCH = "search"
PREPARING, CHOOSING, EXTRACTING = "torch's steps before", "torch's choice", "extraction"
TORCHS_OWN = (PREPARING, CHOOSING, EXTRACTING)
"""Phases that consist of functions of torch's partitioner."""
PHASES: dict[str, tuple[Any, str]] = {
    PREPARING: (joint_problem, "as_in_torch"),
    CHOOSING: (joint_graph, "torch_choices"),
    "plain's peak": (joint_problem, "plain_option"),
    "rewrites": (joint_problem, "apply_to_joint"),
    "reading nodes": (build, "_read"),
    "building problems": (ProblemBuilder, "build"),
    SEARCH: (joint_planning, "_chosen"),
    EXTRACTING: (joint_split, "extract"),
}
TITLES = ("model", "values", "torch", "0.5", "ratio", "min", "ratio", "one search", "frontier", "ratio")


@dataclass(frozen=True)
class PlanningTimeRow:
    """CPU seconds of one model's joint graph.

    Attributes:
        num_values: Number of values of the planning problem.
        torch_s: Torch's partitioner at its budget 0.5.
        half_s: Ours at 0.5.
        min_s: Ours at `min`.
        search_s: One search on the problem, at half of the fastest plan's peak, or the lowest where that is higher.
        frontier_s: `points` plans on the problem.
        phases_s: Seconds of the phases of ours at 0.5; empty if not asked for.
    """

    model: str
    num_values: int
    torch_s: float
    half_s: float
    min_s: float
    search_s: float
    frontier_s: float
    points: int
    phases_s: dict[str, float] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", action="append", choices=list(models.CASES), help="may be repeated; default all")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--points", type=int, default=20, help="plans of the frontier")
    parser.add_argument("--phases", action="store_true", help="also the phases of ours at 0.5")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    rows = []
    for name in arguments.model or list(models.CASES):
        harness.progress(name)
        rows.append(row_of(name, arguments))
        harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(*table(rows)), end="\n\n")
    print(summary(rows))
    if arguments.phases:
        print("\n" + harness.ascii_table(*phases_table(rows)))
    return 0


@frames_in_one_chunk
def row_of(name: str, arguments: argparse.Namespace) -> PlanningTimeRow:
    """Trace one model and plan it."""
    case = models.build(name, device=arguments.device, scale=harness.scale_of(arguments), seed=arguments.seed)
    rows: list[PlanningTimeRow] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def see(joint: fx.GraphModule, keywords: dict[str, Any]) -> None:
            with warnings.catch_warnings():  # a fraction below the floor
                warnings.simplefilter("ignore")
                rows.append(_timed(name, joint, keywords, example_inputs, arguments))

        look_at_joint_graph(gm, example_inputs, see, {})
        return gm.forward

    trace_isolated(case.module, backend, case.inputs)
    (row,) = rows
    return row


def _timed(
    name: str,
    joint: fx.GraphModule,
    keywords: dict[str, Any],
    example_inputs: Sequence[Any],
    arguments: argparse.Namespace,
) -> PlanningTimeRow:
    forget_plain_peaks()  # a fraction is of the largest peak so far: a small model's plan would be that of any size
    at_half, at_min = (settings_for(RematConfig.resolve({"memory_budget": each}), example_inputs) for each in SETTINGS)

    def by_torch(given: fx.GraphModule) -> None:
        with torch_activation_budget(TORCH_BUDGET):
            joint_graph.torch_partition(given, None, **keywords)

    makers: list[Callable[[fx.GraphModule], Any]] = [
        by_torch,
        lambda given: split(given, None, at_half, Fit(), **keywords),
        lambda given: split(given, None, at_min, Fit(), **keywords),
    ]
    taken: list[list[float]] = [[] for _ in makers]
    for turn in range(arguments.repeats + 1):
        for make, seconds in zip(makers, taken, strict=True):
            given = copy.deepcopy(joint)
            with collector_paused():
                taken_s = cpu_seconds(partial(make, given))
            if turn:
                seconds.append(taken_s)
    phases_s = _phases_s(joint, makers[1], arguments.repeats) if arguments.phases else {}
    planned = plan_graph(JointModule(copy.deepcopy(joint), **keywords), at_min, Fit())
    assert planned is not None
    problem = planned.problem
    with collector_paused():
        search_s = min(cpu_seconds(lambda: _search(problem)) for _ in range(arguments.repeats))
        frontier_s = cpu_seconds(lambda: curves(Planner(problem), arguments.points).best)
    torch_s, half_s, min_s = map(min, taken)
    return PlanningTimeRow(
        name, len(problem.values), torch_s, half_s, min_s, search_s, frontier_s, arguments.points, phases_s
    )


def _phases_s(joint: fx.GraphModule, make: Callable[[fx.GraphModule], Any], repeats: int) -> dict[str, float]:
    """The least of each phase over some turns: a machine with other work adds seconds to one phase here, to another there."""
    turns: list[dict[str, float]] = []
    for _ in range(repeats):
        given = copy.deepcopy(joint)
        with collector_paused(), phases_timed(PHASES) as spent:
            make(given)
        turns.append(dict(spent))
    return {phase: min(turn[phase] for turn in turns) for phase in turns[0]}


def _search(problem: Problem) -> None:
    planner = Planner(problem)
    planner.within(planner.fastest().peak_bytes // 2)


def table(rows: Sequence[PlanningTimeRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each model."""
    return TITLES, [_cells(row) for row in rows]


def _cells(row: PlanningTimeRow) -> list[str]:
    return [
        row.model,
        str(row.num_values),
        f"{row.torch_s:.2f} s",
        f"{row.half_s:.2f} s",
        f"{row.half_s / row.torch_s:.2f}",
        f"{row.min_s:.2f} s",
        f"{row.min_s / row.torch_s:.2f}",
        f"{row.search_s:.2f} s",
        f"{row.points} in {row.frontier_s:.1f} s",
        f"{row.frontier_s / row.search_s:.1f}",
    ]


def phases_table(rows: Sequence[PlanningTimeRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each phase: its share in each model, and last torch's own functions over torch's partitioner."""
    names = list(dict.fromkeys(phase for row in rows for phase in row.phases_s))
    lines = [
        [phase, *(f"{row.phases_s.get(phase, 0.0) / sum(row.phases_s.values()):.0%}" for row in rows)]
        for phase in names
    ]
    own = [sum(row.phases_s.get(phase, 0.0) for phase in TORCHS_OWN) / row.torch_s for row in rows]
    return ("phase", *(row.model for row in rows)), [
        *lines,
        ["torch's own / torch", *(f"{ratio:.2f}" for ratio in own)],
        ["all but the search / torch", *(f"{without_search(row):.2f}" for row in rows)],
    ]


def without_search(row: PlanningTimeRow) -> float:
    """Our time at 0.5 if the search took none, over that of torch's partitioner."""
    return (sum(row.phases_s.values()) - row.phases_s.get(SEARCH, 0.0)) / row.torch_s


def summary(rows: Sequence[PlanningTimeRow]) -> str:
    """Median and worst ratios."""
    ratios = {
        "0.5 over torch": [row.half_s / row.torch_s for row in rows],
        "min over torch": [row.min_s / row.torch_s for row in rows],
        "frontier over one search": [row.frontier_s / row.search_s for row in rows],
    }
    if all(row.phases_s for row in rows):
        ratios["0.5 without its search over torch"] = [without_search(row) for row in rows]
    return "\n".join(
        f"{name}: median {statistics.median(values):.2f}, worst {max(values):.2f}" for name, values in ratios.items()
    )


if __name__ == "__main__":
    sys.exit(main())
