"""Recompute time of torch's plans and of ours at the same predicted peak, under one cost model; nothing is compiled.

``python -m benchmarks.against_torch [--model gpt]`` traces the model, asks torch's own chooser for its saved set at several
values of `activation_memory_budget`, prices each with our simulator, and lets our planner fit the same peak.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import harness
from benchmarks.common.harness import mib, ms, percent
from benchmarks.models import CASES, build
from compile_remat._torch import joint_graph
from compile_remat.api import look
from compile_remat.passes import Plan, Planner, build_problem

MIB = 1 << 20
BUDGETS = (1.0, 0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)


@dataclass(frozen=True)
class Pair:
    """Torch's plan at one of its budgets, and ours within the same predicted peak."""

    torch_budget: float
    peak_bytes: int
    torch_recompute_ns: int
    our_peak_bytes: int
    our_recompute_ns: int
    our_gap: float

    @property
    def ratio(self) -> float:
        """Our recompute time over torch's."""
        return self.our_recompute_ns / max(1, self.torch_recompute_ns)


def compare(model: str, scale: float = 1.0, at_bytes: int | None = None) -> tuple[list[Pair], Plan | None]:
    """All pairs of one model, and our plan at `at_bytes` if given."""
    case = build(model, scale=scale)
    planned = look(case.module, case.inputs, for_budgets=True, memory_budget="max", device="cpu")[0]
    planner = Planner(planned.problem)
    cost = planned.cost
    pairs = []
    for budget in BUDGETS:
        chosen = joint_graph.torch_choice(planned.joint, budget)
        problem = build_problem(planned.joint, cost=cost, reference=chosen)
        names = [problem.values[i].name for i in problem.reference]
        theirs = planner.plan_of(planner.mask_of(names), None)
        ours = planner.within(theirs.peak_bytes)
        pairs.append(
            Pair(
                budget,
                theirs.peak_bytes,
                theirs.recompute_time_ns,
                ours.peak_bytes,
                ours.recompute_time_ns,
                ours.gap,
            )
        )
    return pairs, planner.within(at_bytes) if at_bytes else None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and our plan at ``--at-mib`` beside the cheapest of torch's plans that fits there."""
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--model", default="gpt", choices=tuple(CASES))
    parser.add_argument("--at-mib", type=float, default=230.0, help="a budget to compare at (default 230)")
    arguments: argparse.Namespace = parser.parse_args(argv)
    limit = int(arguments.at_mib * MIB)
    pairs, ours = compare(arguments.model, harness.scale_of(arguments), limit)
    head = harness.header("cpu")
    harness.print_header(head)
    titles = ["torch's budget", "peak", "torch ms", "our peak", "our ms", "ours / torch's", "our gap"]
    rows = [
        [
            str(p.torch_budget),
            mib(p.peak_bytes),
            ms(p.torch_recompute_ns),
            mib(p.our_peak_bytes),
            ms(p.our_recompute_ns),
            f"{p.ratio:.2f}",
            percent(p.our_gap),
        ]
        for p in pairs
    ]
    print(f"{arguments.model}: predicted peaks in MiB, estimated recompute time; nothing was compiled\n")
    print(harness.ascii_table(titles, rows))
    near = [p for p in pairs if p.peak_bytes <= limit]
    if ours is not None and near:
        best = min(near, key=lambda p: p.torch_recompute_ns)
        print(
            f"\nat {arguments.at_mib:.0f} MiB: ours {ms(ours.recompute_time_ns)} ms; torch's cheapest plan that fits "
            f"(budget {best.torch_budget}, {mib(best.peak_bytes)} MiB) {ms(best.torch_recompute_ns)} ms; "
            f"ratio {ours.recompute_time_ns / max(1, best.torch_recompute_ns):.2f}"
        )
    harness.write_json(arguments.json, head, pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
