"""Growth of planning with the graph: seconds and host memory of one plan, and of a frontier, from 1,000 to 20,000 forward nodes.

    python -m benchmarks.scale [--nodes 20000] [--kind unequal] [--budget 0.7] [--points 20] [--toy] [--json OUT]

The problems are rows of transformer layers made without a model (`benchmarks.common.synthetic`): `equal` ones, and ones whose
sizes are drawn at random.  Each row of the table has a process of its own, so that its memory is its own: the most that was
resident, less what was before planning.  `gap` is the time between the plan and its proven bound, as a part of the step's
estimated time.  With `--points N`, N budgets between the lowest peak and that of the fastest plan are planned for as well, by
`pareto`'s code, and the lowest peak is looked for beside the one plan, as `compile-remat plan` does.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from benchmarks.common import harness, synthetic
from benchmarks.common.harness import MIB, mib
from benchmarks.common.timing import cpu_seconds, with_cpu_seconds
from compile_remat.passes import Planner, Problem, curves

NODES = (1_000, 2_000, 5_000, 10_000, 20_000)
TOY_NODES = (60, 120)
KINDS: dict[str, Callable[[int, int], Problem]] = {
    "equal": lambda count, seed: synthetic.equal_layers(count),
    "unequal": synthetic.unequal_layers,
}
SHARE = 0.7
TITLES = (
    "layers", "nodes", "steps", "seconds", "host MiB", "budget", "peak", "extra", "bound", "gap", "plans", "floor", "frontier",
)  # fmt: skip


@dataclass(frozen=True)
class ScaleRow:
    """One plan of one problem.

    Attributes:
        nodes, steps: Numbers of nodes of the forward and of steps of the backward.
        planning_s: CPU seconds of this process from the problem to the plan.
        host_bytes: Peak resident memory while planning, less the resident memory before.
        extra, bound: Extra time of the plan, and its proven lower bound: parts of the step's estimated time.
        floor_s: CPU seconds to find the lowest peak afterwards, with the same planner; 0 if not asked for.
        points, frontier_s: Number of budgets planned for in a row, and the seconds that took; 0 if not asked for.
    """

    kind: str
    nodes: int
    steps: int
    status: str
    budget_bytes: int
    peak_bytes: int
    planning_s: float
    host_bytes: int
    extra: float
    bound: float
    simulations: int
    floor_s: float = 0.0
    points: int = 0
    frontier_s: float = 0.0

    @property
    def gap(self) -> float:
        return self.extra - self.bound


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("planning time and memory against the size of the graph")
    parser.add_argument("--nodes", action="append", type=int, help=f"forward nodes; may be repeated (default {NODES})")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="of layers; may be repeated")
    parser.add_argument("--budget", type=float, default=SHARE, help="part of the fastest plan's peak (default 0.7)")
    parser.add_argument("--points", type=int, default=0, help="budgets of a frontier, timed beside the plan")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    rows = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for kind in arguments.kind or KINDS:
            for nodes in arguments.nodes or (TOY_NODES if arguments.toy else NODES):
                harness.progress(f"{kind}, {nodes} nodes: planning")
                work = (kind, nodes, arguments.budget, arguments.points, arguments.seed)
                rows.append(pool.submit(scale_row, *work).result())
    print(harness.ascii_table(*scale_table(rows)))
    harness.write_json(arguments.json, head, rows)
    return 0


def problem_of(kind: str, nodes: int, seed: int) -> Problem:
    """About `nodes` forward nodes."""
    return KINDS[kind](max(1, nodes // synthetic.VALUES_PER_LAYER), seed)


def scale_row(kind: str, nodes: int, share: float, points: int, seed: int) -> ScaleRow:
    """Plan one problem within that share of the fastest plan's peak; the frontier has a planner of its own."""
    problem = problem_of(kind, nodes, seed)
    before = _resident_bytes()  # the most so far: the fastest plan's search counts as well
    budget_bytes = int(share * Planner(problem).fastest().peak_bytes)
    planner, preparing_s = with_cpu_seconds(lambda: Planner(problem))
    plan, search_s = with_cpu_seconds(lambda: planner.within(budget_bytes))
    host_bytes = _resident_bytes() - before
    floor_s = cpu_seconds(planner.lowest) if points else 0.0
    frontier_s = cpu_seconds(lambda: curves(Planner(problem), points).best) if points else 0.0
    extra, bound = (x / max(1, problem.step_time_ns) for x in (plan.extra_time_ns, plan.bound_time_ns))
    return ScaleRow(
        kind,
        len(problem.values),
        len(problem.steps),
        plan.status.name,
        budget_bytes,
        plan.peak_bytes,
        preparing_s + search_s,
        host_bytes,
        extra,
        bound,
        plan.simulations,
        floor_s,
        points,
        frontier_s,
    )


def _resident_bytes() -> int:
    """The most that this process ever held; Linux counts KiB, macOS bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def scale_table(rows: Sequence[ScaleRow]) -> tuple[Sequence[str], list[list[str]]]:
    cells = [
        [
            row.kind,
            str(row.nodes),
            str(row.steps),
            f"{row.planning_s:.2f}",
            mib(row.host_bytes),
            f"{row.budget_bytes / MIB / 1024:.2f} GiB",
            f"{row.peak_bytes / row.budget_bytes:.1%}",
            *(f"{100 * x:.2f}%" for x in (row.extra, row.bound, row.gap)),
            str(row.simulations),
            f"{row.floor_s:.1f} s" if row.points else "-",
            f"{row.points} in {row.frontier_s:.1f} s" if row.points else "-",
        ]
        for row in rows
    ]
    return TITLES, cells


if __name__ == "__main__":
    sys.exit(main())
