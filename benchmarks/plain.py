"""What a fraction is a fraction of: the predicted peak of plain torch.compile against the measured one, and its saved set.

    python -m benchmarks.plain [--model vit] [--dtype bfloat16] [--measured JSON] [--json OUT]

Each model's joint graph is traced, nothing is compiled. `same` says whether our max-flow saves what torch's chooser saves,
the seconds are the CPU time of both choices. Measured peaks are the rows "default" of a file of `benchmarks.promise`; a model that
has no row there has its code emitted now and run dry. The exit status is 1 where the sets differ or where the prediction is more
than 3 % off.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch import fx

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.harness import mib, percent
from benchmarks.common.row_store import rows_of_file
from benchmarks.common.timing import with_cpu_seconds
from benchmarks.table_a import CodeRunner
from compile_remat._torch import joint_graph
from compile_remat.api import look
from compile_remat.runtime.process_state import clear_process_state

RESULTS = Path(__file__).parent / "results"
MEASURED = {"float32": RESULTS / "promise_cpu.json", "bfloat16": RESULTS / "promise_bfloat16_cpu.json"}
WORST_ERROR = 0.03
TITLES = ("model", "same", "ours", "torch's", "predicted", "measured", "error")


@dataclass(frozen=True)
class PlainRow:
    """One model.

    Attributes:
        is_same: Whether our max-flow and torch's chooser save the same nodes.
        choice_s: CPU time of our choice.
        torch_choice_s: The same of torch's.
        measured_peak_bytes: Of a training step, or of the emitted code.
    """

    model: str
    is_same: bool
    choice_s: float
    torch_choice_s: float
    predicted_peak_bytes: int
    measured_peak_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured peak, less 1."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", action="append", choices=list(models.CASES), help="may be repeated; default all")
    parser.add_argument("--dtype", choices=tuple(MEASURED), default="float32", help="what the models train in")
    parser.add_argument("--measured", type=Path, metavar="JSON", help="where measured peaks are")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    found = rows_of_file(arguments.measured or MEASURED[arguments.dtype])
    stored = {row.model: row for row in found if row.kind == "plain"}
    rows = []
    for name in arguments.model or list(models.CASES):
        harness.progress(name)
        row = stored.get(name) or CodeRunner(name, arguments, dtype=arguments.dtype).plain()
        measured_bytes = row.peak_bytes or row.scheduled_peak_bytes
        if measured_bytes is None:
            print(f"{name}: {row.failure}")
            continue
        rows.append(row_of(name, measured_bytes, arguments))
        harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(*table(rows)))
    return int(any(not row.is_same or abs(row.error) > WORST_ERROR for row in rows))


def row_of(name: str, measured_peak_bytes: int, arguments: argparse.Namespace) -> PlainRow:
    """Trace and plan one model under a fraction, both choices beside each other."""
    clear_process_state()
    chosen: list[tuple[list[fx.Node], float]] = []

    def both(joint: Any) -> list[fx.Node]:
        for choose in choices:
            chosen.append(with_cpu_seconds(partial(choose, joint)))
        return chosen[-1][0]

    choices = joint_graph.torch_choice, joint_graph.plain_choice
    scale, seed = harness.scale_of(arguments), arguments.seed
    case = models.build(name, device=arguments.device, scale=scale, seed=seed, dtype=arguments.dtype)
    with mock.patch.object(joint_graph, "plain_choice", both):
        report = look(case.module, case.inputs, memory_budget=0.99)[0].report
    assert report.plain is not None
    (torchs, torch_s), (ours, ours_s) = chosen
    return PlainRow(name, ours == torchs, ours_s, torch_s, report.plain.peak_bytes, measured_peak_bytes)


def table(rows: Sequence[PlainRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each model."""
    return TITLES, [_cells(row) for row in rows]


def _cells(row: PlainRow) -> list[str]:
    return [
        row.model,
        "yes" if row.is_same else "no",
        f"{row.choice_s:.2f} s",
        f"{row.torch_choice_s:.2f} s",
        mib(row.predicted_peak_bytes),
        mib(row.measured_peak_bytes),
        percent(row.error),
    ]


if __name__ == "__main__":
    sys.exit(main())
