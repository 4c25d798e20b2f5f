"""Extra time with and without saved tensors on the host, at equal budgets, and the peaks of the plans' lowered code.

    python -m benchmarks.offload [--model gpt] [--toy] [--json OUT]

Each model is planned on this machine at 0.6 and 0.4 of the peak of `max`, priced as `PRICED` with the bandwidth to the host that
the table of devices has; its code is emitted, and nothing runs.  `extra` is the time beyond plain torch.compile's, as a part of its
step, of the plan that keeps or recomputes all tensors; `moved` that of the plan with `offload="auto"`, and `bound` its proven lower
bound.  `host` are the bytes that leave.  `planned` is the plan's peak, `lowered` that of the emitted code.  "floor": the budget
is below the lowest peak.  The exit status is 1 if code is above its budget, or a plan with copies is slower than one without.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import compile_remat
from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.code_only import compile_code, without_compiler
from benchmarks.common.harness import mib, percent
from compile_remat.errors import BudgetError
from compile_remat.report import Report
from compile_remat.runtime.process_state import clear_process_state

PRICED = "h100-sxm"
MODELS = ("gpt", "llama", "chain256", "resnet", "unet", "experts")
FRACTIONS = (0.6, 0.4)
TITLES = ("model", "budget", "MiB", "extra", "moved", "bound", "host", "copies", "planned", "lowered", "verdict")


@dataclass(frozen=True)
class OffloadRow:
    """One model at one budget.

    Attributes:
        extra_share, moved_share, bound_share: Parts of plain torch.compile's step: without copies, with them, and their bound; None
            where no plan fits.
        host_bytes, copies: Bytes and number of the tensors that wait on the host.
        planned_bytes, lowered_bytes: Peak of the plan with copies, and of its code.
    """

    model: str
    fraction: float
    budget_bytes: int
    extra_share: float | None = None
    moved_share: float | None = None
    bound_share: float | None = None
    host_bytes: int = 0
    copies: int = 0
    planned_bytes: int | None = None
    lowered_bytes: int | None = None

    @property
    def verdict(self) -> str:
        """Says why the row misses, or that it does not."""
        if self.moved_share is None:
            return "floor"
        if self.lowered_bytes is not None and self.lowered_bytes > self.budget_bytes:
            return "miss: above the budget"
        is_slower = self.extra_share is not None and self.moved_share > self.extra_share
        return "miss: slower than without" if is_slower else "ok" if self.copies else "ok, nothing leaves"


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("extra time with and without saved tensors on the host")
    parser.add_argument("--model", action="append", choices=list(models.CASES), help="may be repeated")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device) | {"priced": PRICED}
    harness.print_header(head)
    rows: list[OffloadRow] = []
    for name in arguments.model or MODELS:
        case = models.build(name, device=arguments.device, scale=harness.scale_of(arguments), seed=arguments.seed)
        fastest = _planned(case, "max", "off")
        assert fastest is not None and fastest.predicted_peak_bytes is not None
        for fraction in FRACTIONS:
            harness.progress(f"{name} at {fraction}")
            rows.append(row_of(case, name, fraction, int(fraction * fastest.predicted_peak_bytes)))
            harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(*table(rows)))
    print(summary(rows))
    return int(any(row.verdict.startswith("miss") for row in rows))


def row_of(case: models.Case, name: str, fraction: float, budget_bytes: int) -> OffloadRow:
    """Plan with and without copies, and lower the graphs of both plans."""
    kept, moved = (_planned(case, budget_bytes, offload) for offload in ("off", "auto"))
    row = OffloadRow(name, fraction, budget_bytes, kept.plan.extra_share if kept is not None and kept.plan else None)
    if moved is None or moved.plan is None:
        return row
    return OffloadRow(
        name,
        fraction,
        budget_bytes,
        row.extra_share,
        moved.plan.extra_share,
        moved.plan.bound_share,
        moved.plan.offloaded_bytes,
        len(moved.plan.offloaded),
        moved.plan.peak_bytes,
        moved.scheduled_peak_bytes,
    )


def _planned(case: models.Case, budget_bytes: int | str, offload: str) -> Report | None:
    """The report of a plan whose code was emitted; None if no plan fits."""
    torch.compiler.reset()
    clear_process_state()
    try:
        with without_compiler():
            compile_code(case.module, case.inputs, budget_bytes, device=PRICED, offload=offload)
    except BudgetError:
        return None
    return compile_remat.reports()[-1]


def table(rows: Sequence[OffloadRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles and cells."""
    cells = [
        [
            row.model,
            f"{row.fraction:g}",
            mib(row.budget_bytes),
            *map(percent, (row.extra_share, row.moved_share, row.bound_share)),
            mib(row.host_bytes),
            str(row.copies),
            *map(mib, (row.planned_bytes, row.lowered_bytes)),
            row.verdict,
        ]
        for row in rows
    ]
    return TITLES, cells


def summary(rows: Sequence[OffloadRow]) -> str:
    """One line: how many rows are faster with copies, and the largest gain."""
    known = [(row.extra_share, row.moved_share) for row in rows]
    gains = [extra - moved for extra, moved in known if extra is not None and moved is not None]
    reached = sum(extra is None and moved is not None for extra, moved in known)
    faster = sum(gain > 0 for gain in gains)
    best = percent(max(gains, default=0.0))
    return (
        f"{len(rows)} rows: {faster} faster with copies, by at most {best} of the step; {reached} fit with copies alone"
    )


if __name__ == "__main__":
    sys.exit(main())
