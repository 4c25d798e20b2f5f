"""What this process planned: one `Report` for each graph, in memory and, where asked, as a JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from compile_remat.passes import Plan
from compile_remat.units import format_bytes

_REPORTS: list[Report] = []


@dataclass(frozen=True)
class Report:
    """One graph's plan and what it promises.

    Attributes:
        graph_key: Hash of the planning problem; names the files in `report_dir` and `plan_dir`.
        budget: The setting as the user gave it.
        budget_bytes: The bytes it stood for; None where no number of bytes was asked for.
        plan: The plan that runs.
        floor_bytes: The lowest reachable peak, where it was worked out.
        planning_time_s: Seconds between receiving the joint graph and handing over two modules.
        message: What went otherwise than asked, in a sentence; empty where nothing did.
        check: How the comparison of the first step ended (option `check`): `passed`, `failed: ...` or `skipped: ...`; empty
            before that and without the option.
    """

    graph_key: str
    budget: str
    budget_bytes: int | None
    plan: Plan
    floor_bytes: int | None = None
    planning_time_s: float = 0.0
    message: str = ""
    check: str = ""

    @property
    def predicted_peak_bytes(self) -> int:
        """The plan's region peak."""
        return self.plan.peak_bytes

    @property
    def step_time_ns(self) -> int:
        """Estimated time of forward and backward with nothing recomputed."""
        return self.plan.step_time_ns

    @property
    def recompute_time_ns(self) -> int:
        """Estimated time of what is computed twice."""
        return self.plan.recompute_time_ns

    @property
    def extra_time_ns(self) -> int:
        """Estimated time beyond the fastest plan of any size."""
        return self.plan.extra_time_ns

    @property
    def lower_bound_time_ns(self) -> int:
        """Proven least extra time within the budget."""
        return self.plan.bound_time_ns

    @property
    def gap(self) -> float:
        """Extra time above the bound, as a fraction of the step's estimated time."""
        return self.plan.gap

    @property
    def status(self) -> str:
        """Name of the plan's `Status`."""
        return self.plan.status.name

    @property
    def num_saved(self) -> int:
        """How many tensors go from forward to backward, inputs not counted."""
        return len(self.plan.saved)

    @property
    def num_recomputed(self) -> int:
        """How many values the backward computes once more."""
        return len(self.plan.recomputed)

    def __str__(self) -> str:
        lines = [f"graph {self.graph_key}, memory_budget {self.budget}", str(self.plan)]
        if self.floor_bytes is not None:
            lines.append(f"  lowest reachable peak {format_bytes(self.floor_bytes)}")
        lines.append(f"  planned in {self.planning_time_s:.2f} s")
        if self.message:
            lines.append(f"  note: {self.message}")
        if self.check:
            lines.append(f"  check {self.check}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON, the plan inside."""
        data = {**asdict(replace(self)), "plan": json.loads(self.plan.to_json())}
        return json.dumps(data, indent=1)


def reports() -> list[Report]:
    """Reports of the graphs that this process planned, in order; a cache hit plans nothing and adds none."""
    return list(_REPORTS)


def reset_reports() -> None:
    """Forget them."""
    _REPORTS.clear()


def record(report: Report, report_dir: str | None) -> None:
    """Keep a report, and write it to ``<report_dir>/<graph key>.rank<rank>.json``."""
    _REPORTS.append(report)
    _write(report, report_dir)


def amend(report: Report, report_dir: str | None, *, check: str) -> None:
    """Say in a report that was recorded how its check ended; one that was forgotten since is only written."""
    amended = replace(report, check=check)
    _REPORTS[:] = [amended if r is report else r for r in _REPORTS]
    _write(amended, report_dir)


def _write(report: Report, report_dir: str | None) -> None:
    if report_dir is not None:
        folder = Path(report_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rank = os.environ.get("RANK", "0")
        (folder / f"{report.graph_key}.rank{rank}.json").write_text(report.to_json())
