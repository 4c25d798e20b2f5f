"""What of a step is longer in slices: CPU time of the case `head` at `min`, whole and in slices, and of its wide product alone.

    python -m benchmarks.slice_time [--slices 4] [--rounds 12] [--toy]

One thread, interleaved; the clock is the process's CPU time, so that other processes count less.  The product is that of the
hidden states with the head, whole and slice by slice: slices make it once more.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks import slices
from benchmarks.common import harness


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("what of a step is longer in slices")
    parser.add_argument("--slices", type=int, default=4, help="number of slices (default 4)")
    parser.add_argument("--rounds", type=int, default=12, help="of steps (default 12)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    harness.print_header(harness.header(arguments.device))
    rows = measured(arguments)
    cells = [[name, f"{statistics.median(times) / 1e6:.1f}", f"{min(times) / 1e6:.1f}"] for name, times in rows.items()]
    print(harness.ascii_table(("", "median ms", "minimum ms"), cells))
    return 0


def measured(arguments: argparse.Namespace) -> dict[str, list[int]]:
    """CPU time of each round, by what ran, in nanoseconds."""
    case = slices.build("head", harness.scale_of(arguments), arguments.seed)
    whole = harness.remat(case, "min")
    sliced = harness.remat(
        slices.build("head", harness.scale_of(arguments), arguments.seed), "min", slices=str(arguments.slices)
    )
    hidden, head = case.inputs[0], dict(case.module.named_parameters())["head.weight"].detach()
    logits = torch.empty(len(hidden), len(head))
    runs = {
        "step, whole": whole.clear_and_step,
        f"step, {arguments.slices} slices": sliced.clear_and_step,
        "product, whole": lambda: product(hidden, head, logits, 1),
        f"product, {arguments.slices} slices": lambda: product(hidden, head, logits, arguments.slices),
    }
    for run in (*runs.values(), *runs.values()):
        run()
    times: dict[str, list[int]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            start = time.process_time_ns()
            run()
            times[name].append(time.process_time_ns() - start)
    return times


def product(hidden: torch.Tensor, head: torch.Tensor, logits: torch.Tensor, num_slices: int) -> None:
    """The logits of all rows, each slice written over the one before."""
    for rows in hidden.chunk(num_slices):
        torch.mm(rows, head.t(), out=logits[: len(rows)])


if __name__ == "__main__":
    sys.exit(main())
