"""Reports: one for each graph that this process compiled, in memory and, with `report_dir`, as JSON files."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compile_remat._util import json_values
from compile_remat._util.atomic_write import write_atomically
from compile_remat._util.size_range import SizeRange
from compile_remat._util.units import format_bytes, format_time
from compile_remat.pages.figures import PREDICTED, PageFigures
from compile_remat.pages.viewable import Viewable
from compile_remat.passes import NodeTable, Plan, PlanOption, PlanPictures, Status

LOG = logging.getLogger("compile_remat")

_REPORTS: list[Report] = []
_FOLDER: list[str] = []
"""Where reports go that no backend of ours writes (`install`): one folder or none."""

_RECORDED: ContextVar[list[Report] | None] = ContextVar("compile_remat recorded", default=None)
_FIELDS: ContextVar[Mapping[str, Any]] = ContextVar(
    "compile_remat fields of what is recorded", default=MappingProxyType({})
)


@dataclass(frozen=True)
class Report(Viewable):
    """One graph's plan and what it promises.

    Attributes:
        graph_key: Hash of the planning problem; names the files in `report_dir` and `plan_dir`.
        budget: The setting as the user gave it.
        budget_bytes: The bytes it stood for; None where no number of bytes was asked for.
        plan: The plan that runs; None where the planner failed before it could say what torch's own choice comes to.
        floor_bytes: The lowest reachable peak, where it was worked out.
        planning_time_s: Seconds between receiving the joint graph and handing over two modules.
        message: How the plan differs from what was asked, in a sentence; empty where it does not.
        from_cache: Whether torch's cache had the compiled graphs, and with them the plan of an earlier compilation.
        plain: What plain torch.compile takes for this graph; None where nobody asked: no fraction, no peers.
        offers: What this graph could run under instead, where it shares its budget with other graphs of the step.
        observed_peak_bytes: The region peak of the graphs as Inductor lowered them, before it made any code; None where they were
            not read.
        rounds: How many plans were lowered for it, this one among them.
        scheduled_peak_bytes: The region peak of the code that Inductor emitted, by a dry run of it; None where there is no limit
            to keep, for `compiler="eager"`, and for code that a dry run cannot follow.
        reserved_peak_bytes: What torch's CUDA allocator reserves for such steps, where it held nothing before: a replay of the
            code's allocations by the allocator's rules.  None on other devices.
        required_peak_bytes: The part of it that the allocator cannot give back when memory is short; `auto` keeps this inside
            its budget.
        measured_peak_bytes: The peak as the allocator saw it in a step in which this graph ran alone; None before that.  On CUDA
            it is read in the first steps, anywhere under `measured_step`; what the step holds beside the graph counts in it.
        measured_in_first_call: Whether that was the call in which kernels were tuned (each is timed with a buffer of the size of
            the L2 cache beside it) and libraries took their workspaces: later steps need less.
        check: How the comparison of the first step ended (option `check`): `passed`, `failed: ...` or `skipped: ...`; empty
            before that and without the option.
        caveat: Why the budget may not hold for this graph: it has no plan, or an option changes its memory after the plan.
        estimated_ops: Operators whose arithmetic no formula knows (custom operators, scans): priced by their bytes alone.
        inlined_calls: The number of calls of ``nested_compile_region`` regions that were replaced by the regions' bodies, so that
            the budget holds inside them.
        num_early: The number of gradients that leave the backward when they are made (`gradients="early"`).
        early_bytes: Bytes of these gradients, each counted once.
        num_snapshots: How many copies of inputs the plan saves, which the backward reads in place of the inputs (`inputs`).
        snapshot_bytes, snapshot_time_ns: Their bytes, and the estimated time of making them; part of the peak and the extra time.
        inputs_beyond_plain: Positions of the arguments that the backward reads and that of plain torch.compile does not: they
            must not change before it has run.
        inputs_as_plain: Where there are such, the positions of the others that it reads.
        size_range: For a graph of varying shapes with a budget: the sizes in which the plan keeps it.
        region: The number of the compiled graph in this process: plans of one graph have the same.
        runs_now: Whether the plan may run in the next step; False once another one has taken its place.
        step_peak_bytes: The predicted peak of the whole step, once its graphs were given plans that go together.
        step_budget_bytes: What the step may take then; None where the lowest peak is asked for.
    """

    graph_key: str
    budget: str
    budget_bytes: int | None
    plan: Plan | None
    floor_bytes: int | None = None
    planning_time_s: float = 0.0
    message: str = ""
    from_cache: bool = False
    check: str = ""
    caveat: str = ""
    observed_peak_bytes: int | None = None
    rounds: int = 1
    scheduled_peak_bytes: int | None = None
    offers: tuple[PlanOption, ...] = ()
    reserved_peak_bytes: int | None = None
    required_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_in_first_call: bool = False
    estimated_ops: tuple[str, ...] = ()
    inlined_calls: int = 0
    plain: PlanOption | None = None
    num_early: int = 0
    early_bytes: int = 0
    num_snapshots: int = 0
    snapshot_bytes: int = 0
    snapshot_time_ns: int = 0
    inputs_beyond_plain: tuple[int, ...] = ()
    inputs_as_plain: tuple[int, ...] = ()
    size_range: SizeRange | None = None
    region: int = 0
    runs_now: bool = True
    step_peak_bytes: int | None = None
    step_budget_bytes: int | None = None

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The plan's region peak, as it was observed or else as it was assumed.

        This and the figures below are None where there is no plan.
        """
        return self.observed_peak_bytes or (None if self.plan is None else self.plan.peak_bytes)

    @property
    def prediction_error(self) -> float | None:
        """Predicted peak over measured peak, less 1."""
        return self._error_of(self.predicted_peak_bytes)

    @property
    def schedule_error(self) -> float | None:
        """Codegen peak over measured peak, less 1."""
        return self._error_of(self.scheduled_peak_bytes)

    @property
    def _by_settings(self) -> Iterator[tuple[str, str]]:
        """The effects of settings on what is saved, by name."""
        if self.num_snapshots:
            size, time = format_bytes(self.snapshot_bytes), format_time(self.snapshot_time_ns)
            yield "input snapshots", f"{self.num_snapshots}, {size}, {time} (inputs = as_plain)"
        if self.num_early:
            yield "gradients leave early", f"{self.num_early}, {format_bytes(self.early_bytes)}"

    def _error_of(self, peak_bytes: int | None) -> float | None:
        measured_bytes = self.measured_peak_bytes
        if peak_bytes is None or not measured_bytes or self.measured_in_first_call:
            return None
        return peak_bytes / measured_bytes - 1

    @property
    def facts(self) -> NodeTable:
        """For each node of the plan, what the planner assumed and what was observed of the graphs that Inductor lowered.

        Empty where they were not lowered in this process: for a device that is not here, or out of torch's cache.
        """
        pictures = None if self.plan is None else self.plan.pictures
        return pictures.nodes(self.plan) if self.plan and isinstance(pictures, PlanPictures) else NodeTable()

    @property
    def step_time_ns(self) -> int | None:
        """Estimated time of forward and backward with nothing recomputed."""
        return None if self.plan is None else self.plan.step_time_ns

    @property
    def recompute_time_ns(self) -> int | None:
        """Estimated time of what is computed twice."""
        return None if self.plan is None else self.plan.recompute_time_ns

    @property
    def extra_time_ns(self) -> int | None:
        """Estimated time beyond the fastest plan of any size."""
        return None if self.plan is None else self.plan.extra_time_ns

    @property
    def lower_bound_time_ns(self) -> int | None:
        """Proven least extra time within the budget."""
        return None if self.plan is None else self.plan.bound_time_ns

    @property
    def gap(self) -> float | None:
        """Extra time above the bound, as a fraction of the step's estimated time."""
        return None if self.plan is None else self.plan.gap

    @property
    def num_saved(self) -> int | None:
        """Number of tensors saved for the backward, inputs not counted."""
        return None if self.plan is None else len(self.plan.saved)

    @property
    def num_recomputed(self) -> int | None:
        """Number of values that the backward recomputes."""
        return None if self.plan is None else len(self.plan.recomputed)

    @property
    def status(self) -> str:
        """Name of the plan's `Status`, FALLBACK where the planner failed; with a `caveat`, NOT_PLANNED or NOT_MODELLED."""
        if self.caveat:
            return "NOT_PLANNED" if self.plan is None else "NOT_MODELLED"
        return (Status.FALLBACK if self.plan is None else self.plan.status).name

    def figures(self, points: int = 0) -> PageFigures:
        """What a page shows of it, with a frontier of so many budgets."""
        without = PageFigures("", f"Not planned: {self.caveat}" if self.caveat else Status.FALLBACK.value)
        base = without if self.plan is None else self.plan.figures(points)
        peaks = {
            "plain torch.compile": None if self.plain is None else self.plain.peak_bytes,
            PREDICTED: self.predicted_peak_bytes,
            "scheduled peak": self.scheduled_peak_bytes,
            "reserved peak": self.reserved_peak_bytes,
            "measured peak": self.measured_peak_bytes,
        }
        said = (f"Not modelled: {self.caveat}" * bool(self.plan and self.caveat), self.message, *base.notes)
        seconds = f"{self.planning_time_s:.2f} s" + ", now taken from the cache" * self.from_cache
        facts = [("memory_budget", self.budget), *base.facts, ("planned in", seconds)]
        if self.size_range is not None:
            facts.append(("keeps the budget for", str(self.size_range)))
        facts.extend(self._by_settings)
        if self.check:
            facts.append(("check", self.check))
        return replace(
            base,
            title=f"Graph {self.graph_key}, memory_budget {self.budget}",
            peaks=tuple((name, nbytes) for name, nbytes in peaks.items() if nbytes is not None),
            budget_bytes=self.budget_bytes,
            floor_bytes=self.floor_bytes,
            facts=tuple(facts),
            notes=tuple(filter(None, said)),
        )

    def __str__(self) -> str:
        without = f"not planned: {self.caveat}" if self.caveat else Status.FALLBACK.value
        plan = f"No plan\n  {'status':<15} {without}" if self.plan is None else str(self.plan)
        lines = [f"graph {self.graph_key}, memory_budget {self.budget}", plan]
        peaks = {
            "plain torch.compile": None if self.plain is None else self.plain.peak_bytes,
            "scheduled peak ": self.scheduled_peak_bytes,
            "reserved peak  ": self.reserved_peak_bytes,
        }
        if self.floor_bytes is not None:
            lines.append(f"  lowest reachable peak {floor_text(self.floor_bytes, self.plan)}")
        lines.extend(f"  {name} {format_bytes(nbytes)}" for name, nbytes in peaks.items() if nbytes is not None)
        if self.measured_peak_bytes is not None:
            errors = {"predicted": self.prediction_error, "scheduled": self.schedule_error}
            text = ", ".join(f"{name} {error:+.1%}" for name, error in errors.items() if error is not None)
            text = "in the first call, with the tuning of kernels" if self.measured_in_first_call else text
            lines.append(f"  measured peak   {format_bytes(self.measured_peak_bytes)}" + f" ({text})" * bool(text))
        lines.append(f"  planned in {self.planning_time_s:.2f} s" + ", now taken from the cache" * self.from_cache)
        if self.size_range is not None:
            lines.append(f"  keeps the budget for {self.size_range}")
        lines.extend(f"  {name:<15} {text}" for name, text in self._by_settings)
        if self.estimated_ops:
            lines.append(f"  estimated by bytes alone: {', '.join(self.estimated_ops)}")
        if not self.runs_now:
            lines.append("  replaced        by a later plan of the same graph")
        if self.inlined_calls:
            lines.append(f"  inlined         {self.inlined_calls} calls of nested_compile_region")
        note = joined(f"not modelled: {self.caveat}" * bool(self.plan and self.caveat), self.message)
        if note:
            lines.append(f"  note: {note}")
        if self.check:
            lines.append(f"  check {self.check}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON, the plan inside; `from_json` gives an equal one."""
        plan = None if self.plan is None else json.loads(self.plan.to_json())
        return json.dumps({**asdict(self), "plan": plan}, indent=1)

    @staticmethod
    def from_json(text: str) -> Report:
        """Read what `to_json` wrote; ValueError where it is no report of this version."""
        return Report.from_object(json_values.parse(text))

    @staticmethod
    def from_object(data: object) -> Report:
        """The same of JSON that is parsed already."""
        if not isinstance(data, dict) or "plan" not in data:
            raise ValueError("not a report")
        plan = None if data["plan"] is None else Plan.from_object(data["plan"])
        known = {name: value for name, value in data.items() if name != "spared_bytes"}  # older reports have it
        return replace(json_values.read_as(Report, {**known, "plan": None}), plan=plan)


def reports() -> list[Report]:
    """Reports of the graphs that this process compiled, in order, those that came from torch's cache included."""
    return list(_REPORTS)


def reset_reports() -> None:
    """Drop all reports."""
    _REPORTS.clear()


def joined(*messages: str) -> str:
    """Messages of a report as one; empty ones are left out."""
    return "; ".join(filter(None, messages))


def record(report: Report) -> None:
    """Keep a report: under `recording` with the others of the compilation, else at once."""
    recorded = _RECORDED.get()
    if recorded is not None:
        recorded.append(replace(report, **_FIELDS.get()))
        return
    _REPORTS.append(report)
    for folder in _FOLDER:
        write(report, folder)


@contextmanager
def recording(**fields: Any) -> Iterator[list[Report]]:
    """What one compilation records, in this thread; it becomes part of `reports` when the compilation succeeds.

    Args:
        fields: Values of fields that each of these reports gets, also under a `recording` inside of this one.
    """
    recorded: list[Report] = []
    token, token_of_fields = _RECORDED.set(recorded), _FIELDS.set({**_FIELDS.get(), **fields})
    try:
        yield recorded
    finally:
        _RECORDED.reset(token)
        _FIELDS.reset(token_of_fields)
    outer = _RECORDED.get()
    (_REPORTS if outer is None else outer).extend(recorded)


def write_to(report_dir: str | None) -> None:
    """From now on, write the reports that are recorded outside of `recording` to this folder; None ends that."""
    _FOLDER[:] = [] if report_dir is None else [report_dir]


def write(report: Report, report_dir: str) -> None:
    """Write ``<report_dir>/<graph key>.rank<rank>.json``; where that fails, say so and let training go on."""
    path = Path(report_dir) / f"{report.graph_key}.rank{os.environ.get('RANK', '0')}.json"
    try:
        write_atomically(path, report.to_json())
    except OSError as error:
        LOG.warning("report_dir: %s cannot be written (%s)", path, error)


def amend(report: Report, report_dir: str | None, **changes: Any) -> None:
    """Replace fields of a recorded report, in memory and on disk; a report that was dropped meanwhile is only written."""
    amended = replace(report, **changes)
    for kept in (_RECORDED.get() or [], _REPORTS):
        for k, other in enumerate(kept):  # other threads append meanwhile
            if other is report:
                kept[k] = amended
    if report_dir is not None:
        write(amended, report_dir)


def retire(region: int, report_dir: str | None) -> None:
    """Another plan of this compiled graph runs from now on."""
    for report in reports():
        if report.region == region and report.runs_now:
            amend(report, report_dir, runs_now=False)


def latest(graph_key: str) -> Report | None:
    """The report of the plan that a graph runs under now: the last one that was recorded."""
    return next((report for report in reversed(_REPORTS) if report.graph_key == graph_key), None)


def floor_text(floor_bytes: int, plan: Plan | None) -> str:
    """The lowest peak found, with the proven least one and the gap between the two as a part of the latter, where it is known."""
    least_bytes = 0 if plan is None else plan.least_peak_bytes
    if not least_bytes:
        return format_bytes(floor_bytes)
    gap = floor_bytes / least_bytes - 1
    return f"{format_bytes(floor_bytes)} (no plan needs less than {format_bytes(least_bytes)}, gap {gap:.1%})"
