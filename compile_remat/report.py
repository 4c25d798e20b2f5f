"""Reports: one for each plan of each graph that this process compiled, in memory and, with `report_dir`, as JSON files."""

from __future__ import annotations

import json
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
from compile_remat._util.units import common_unit, format_bytes, format_time
from compile_remat.errors import warn_unwritable
from compile_remat.pages.figures import PREDICTED, PageFigures
from compile_remat.pages.viewable import Viewable
from compile_remat.passes import NodeTable, Plan, PlanOption, Status
from compile_remat.passes.pictures.plan_pictures import PlanPictures
from compile_remat.report_table import Reports

_REPORTS: list[Report] = []
_FOLDER: list[str] = []
"""The folder of reports that are recorded outside of the backend (`install`), as a list of at most one."""

_RECORDED: ContextVar[list[Report] | None] = ContextVar("compile_remat recorded", default=None)
_FIELDS: ContextVar[Mapping[str, Any]] = ContextVar(
    "compile_remat fields of what is recorded", default=MappingProxyType({})
)


@dataclass(frozen=True)
class Report(Viewable):
    """One graph's plan, with its predicted and measured figures.

    Attributes:
        graph_key: Hash of the planning problem; names the files in `report_dir` and `plan_dir`.
        budget: The setting as the user gave it.
        budget_bytes: The budget in bytes; None if the setting stands for no number of bytes.
        plan: The plan that runs; None if the planner failed and could not describe torch's own choice.
        floor_bytes: The lowest reachable peak; None if it was not computed.
        planning_time_s: Seconds between receiving the joint graph and returning the two modules.
        message: Deviations of the plan from the request, in a sentence; empty if there are none.
        from_cache: True if torch's cache had the compiled graphs, and with them the plan of an earlier compilation.
        plain: Plain torch.compile's plan option for this graph; None if it was not needed (no fraction, no peers).
        offers: The menu of plan options of this graph, if it shares its budget with other graphs of the step.
        left_bytes: Bytes of the step's budget that other graphs left to this graph's peak when it was planned; None if unknown.
        observed_peak_bytes: The region peak of the graphs as Inductor lowered them, before it emitted code; None if they were not
            read.
        rounds: Number of plans that were lowered for this graph, this one included.
        scheduled_peak_bytes: The region peak of the code that Inductor emitted, from a dry run of the code; None if there is no
            limit to keep, for `compiler="eager"`, and for code that a dry run cannot follow.
        reserved_peak_bytes: Bytes that torch's CUDA allocator reserves for such steps if it held none before, from a replay of the
            code's allocations by the allocator's rules.  None on other devices.
        required_peak_bytes: The part of the reserved peak that the allocator cannot give back when memory is short; `auto` keeps
            this part inside its budget.
        measured_peak_bytes: The allocator's peak in a step in which only this graph ran; None before such a step.  On CUDA it is
            read in the first steps, on all devices under `measured_step`; the step's other allocations count, too.
        measured_in_first_call: True if the measured call was the first, in which kernels were tuned (each is timed with an extra
            buffer of the size of the L2 cache) and libraries allocated their workspaces: later steps need less.
        check: Outcome of the comparison of the first step (option `check`): `passed`, `failed: ...` or `skipped: ...`; empty
            before the comparison and without the option.
        caveat: Reason why the budget may not hold: the graph has no plan, or an option changes its memory after the plan.
        estimated_ops: Operators without a formula for their arithmetic (custom operators, scans): priced by their bytes alone.
        inlined_calls: The number of calls of ``nested_compile_region`` regions that were replaced by the regions' bodies, so that
            the budget holds inside them.
        num_early: The number of gradients that leave the backward when they are made (`gradients="early"`).
        early_bytes: Bytes of these gradients, each counted once.
        num_snapshots: Number of copies of inputs that the plan saves and the backward reads in place of the inputs (`inputs`).
        snapshot_bytes, snapshot_time_ns: Bytes of these copies, and the estimated time of copying; part of the peak and extra time.
        inputs_beyond_plain: Positions of the arguments that only this backward reads, and plain torch.compile's does not: they must
            not change before the backward has run.
        inputs_as_plain: Positions of the other arguments that this backward reads; empty if `inputs_beyond_plain` is empty.
        size_range: For a graph of dynamic shapes with a budget: the sizes in which the plan keeps the budget.
        region: The number of the compiled graph in this process; all plans of one graph have the same number.
        runs_now: True if the plan may run in the next step; False once another plan has replaced it.
        step_peak_bytes: The predicted peak of the whole step, after a joint allocation; None before.
        step_budget_bytes: The budget of the step in that allocation; None if the lowest peak is requested.
        module: The class of the compiled module, the user's own rather than one of torch's, or the name of the compiled function;
            empty if unknown.
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
    left_bytes: int | None = None
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
    module: str = ""

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The plan's region peak: observed if the graphs were read, else planned.

        This figure and the ones below are None if there is no plan.
        """
        return self.observed_peak_bytes or (None if self.plan is None else self.plan.peak_bytes)

    @property
    def prediction_error(self) -> float | None:
        """Predicted peak divided by measured peak, minus 1; None without a measured peak, or with one from the first call."""
        return self._error_of(self.predicted_peak_bytes)

    @property
    def schedule_error(self) -> float | None:
        """Codegen peak divided by measured peak, minus 1; None as for `prediction_error`."""
        return self._error_of(self.scheduled_peak_bytes)

    @property
    def _by_settings(self) -> Iterator[tuple[str, str]]:
        """Effects of settings on the saved values and early gradients, as names and texts."""
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
        """For each node of the plan, the planner's assumptions and the facts observed of the graphs that Inductor lowered.

        Empty if the graphs were not lowered in this process: for a device that is not here, or from torch's cache.
        """
        pictures = None if self.plan is None else self.plan.pictures
        return pictures.nodes(self.plan) if self.plan and isinstance(pictures, PlanPictures) else NodeTable()

    @property
    def step_time_ns(self) -> int | None:
        """Estimated time of forward and backward under the plan."""
        return None if self.plan is None else self.plan.time_ns

    @property
    def recompute_time_ns(self) -> int | None:
        """Estimated time of the recomputed values."""
        return None if self.plan is None else self.plan.recompute_time_ns

    @property
    def extra_time_ns(self) -> int | None:
        """Estimated time beyond the fastest plan of any size."""
        return None if self.plan is None else self.plan.extra_time_ns

    @property
    def lower_bound_time_ns(self) -> int | None:
        """Proven lower bound of the extra time of any plan within the budget."""
        return None if self.plan is None else self.plan.bound_time_ns

    @property
    def gap(self) -> float | None:
        """Extra time above the lower bound, as a fraction of the step's estimated time."""
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
        """Name of the plan's `Status`, FALLBACK if the planner failed; with a `caveat`, NOT_PLANNED or NOT_MODELLED."""
        if self.caveat:
            return "NOT_PLANNED" if self.plan is None else "NOT_MODELLED"
        return (Status.FALLBACK if self.plan is None else self.plan.status).name

    def figures(self, points: int = 0) -> PageFigures:
        """Returns the report's figures for a page, with a frontier of `points` budgets."""
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
        of_plan = [fact for fact in base.facts if fact[0] != "graph"]
        facts = [("memory_budget", self.budget), *of_plan, ("planned in", seconds)]
        if self.size_range is not None:
            facts.append(("keeps the budget for", str(self.size_range)))
        facts.extend(self._by_settings)
        if self.check:
            facts.append(("check", self.check))
        facts.append(("graph", self.graph_key))
        return replace(
            base,
            title=f"{self.module or 'Graph'}, memory_budget {self.budget}",
            peaks=tuple((name, nbytes) for name, nbytes in peaks.items() if nbytes is not None),
            budget_bytes=self.budget_bytes,
            floor_bytes=self.floor_bytes,
            facts=tuple(facts),
            notes=tuple(filter(None, said)),
        )

    def __str__(self) -> str:
        without = f"not planned: {self.caveat}" if self.caveat else Status.FALLBACK.value
        plan = f"No plan\n  {'status':<15} {without}" if self.plan is None else str(self.plan)
        lines = [f"{self.module or 'Graph'}, memory_budget {self.budget}", plan]
        unit = "" if self.plan is None else self.plan.unit
        peaks = {
            "plain torch.compile": None if self.plain is None else self.plain.peak_bytes,
            "scheduled peak ": self.scheduled_peak_bytes,
            "reserved peak  ": self.reserved_peak_bytes,
        }
        if self.floor_bytes is not None:
            lines.append(f"  lowest reachable peak {floor_text(self.floor_bytes, self.plan)}")
        lines.extend(f"  {name} {format_bytes(nbytes, unit)}" for name, nbytes in peaks.items() if nbytes is not None)
        if self.measured_peak_bytes is not None:
            errors = {"predicted": self.prediction_error, "scheduled": self.schedule_error}
            text = ", ".join(f"{name} {error:+.1%}" for name, error in errors.items() if error is not None)
            text = "in the first call, with the tuning of kernels" if self.measured_in_first_call else text
            lines.append(
                f"  measured peak   {format_bytes(self.measured_peak_bytes, unit)}" + f" ({text})" * bool(text)
            )
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
        lines.append(f"  graph           {self.graph_key}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the report as JSON, with the plan inside; `from_json` reads back an equal report."""
        plan = None if self.plan is None else json.loads(self.plan.to_json())
        return json.dumps({**asdict(self), "plan": plan}, indent=1)

    @staticmethod
    def from_json(text: str) -> Report:
        """Returns the report that `to_json` wrote; raises ValueError if the text is no report of this version."""
        return Report.from_object(json_values.parse(text))

    @staticmethod
    def from_object(data: object) -> Report:
        """Returns the report of an already parsed JSON value; raises ValueError as `from_json`."""
        if not isinstance(data, dict) or "plan" not in data:
            raise ValueError("not a report")
        plan = None if data["plan"] is None else Plan.from_object(data["plan"])
        known = {name: value for name, value in data.items() if name != "spared_bytes"}  # older reports have it
        return replace(json_values.read_as(Report, {**known, "plan": None}), plan=plan)


def reports() -> Reports:
    """Returns the reports of the graphs that this process compiled, in order, including graphs from torch's cache.

    Examples:
        >>> layers = [layer for _ in range(20) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
        >>> step = torch.compile(torch.nn.Sequential(*layers), backend="remat", options={"memory_budget": "30MiB"})
        >>> step(torch.randn(2048, 256)).mean().backward()
        >>> [f"{report.predicted_peak_bytes / 2**20:.1f} of {report.budget}" for report in compile_remat.reports()]
        ['29.0 of 30MiB']
    """
    return Reports(_REPORTS)


def reset_reports() -> None:
    """Drop all reports."""
    _REPORTS.clear()


def joined(*messages: str) -> str:
    """Returns the non-empty messages of a report, joined into one."""
    return "; ".join(filter(None, messages))


def record(report: Report) -> Report:
    """Keep a report: inside of `recording` with the others of the compilation, else at once, in `reports` and on disk.

    Returns the report that was kept, with the fields of `recording`.
    """
    recorded = _RECORDED.get()
    if recorded is not None:
        recorded.append(replace(report, **_FIELDS.get()))
        return recorded[-1]
    _REPORTS.append(report)
    for folder in _FOLDER:
        write(report, folder)
    return report


@contextmanager
def recording(**fields: Any) -> Iterator[list[Report]]:
    """Collect the reports of one compilation in this thread; they become part of `reports` when the compilation succeeds.

    Args:
        fields: Values of fields that each of these reports gets, also inside of a nested `recording`.
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
    """From now on, write reports that are recorded outside of `recording` to this folder; None writes none."""
    _FOLDER[:] = [] if report_dir is None else [report_dir]


def write(report: Report, report_dir: str) -> None:
    """Write ``<report_dir>/<graph key>.rank<rank>.json``; if that fails, warn and let training go on."""
    path = Path(report_dir) / f"{report.graph_key}.rank{os.environ.get('RANK', '0')}.json"
    try:
        write_atomically(path, report.to_json())
    except OSError as error:
        warn_unwritable("report_dir", report_dir, error, "with its reports in `reports()` alone")


def amend(report: Report, report_dir: str | None, **changes: Any) -> None:
    """Replace fields of a recorded report, in memory and on disk; a report that was dropped meanwhile is only written to disk."""
    amended = replace(report, **changes)
    for kept in (_RECORDED.get() or [], _REPORTS):
        for k, other in enumerate(kept):  # other threads may append meanwhile
            if other is report:
                kept[k] = amended
    if report_dir is not None:
        write(amended, report_dir)


def retire(region: int, report_dir: str | None) -> None:
    """Mark all reports of this compiled graph as replaced: another plan runs from now on."""
    for report in reports():
        if report.region == region and report.runs_now:
            amend(report, report_dir, runs_now=False)


def latest(graph_key: str) -> Report | None:
    """Returns the report of the plan that a graph runs under now, the last one recorded; None if there is none."""
    return next((report for report in reversed(_REPORTS) if report.graph_key == graph_key), None)


def floor_text(floor_bytes: int, plan: Plan | None) -> str:
    """Returns the text of `floor_parts` as one line."""
    found, *proven = floor_parts(floor_bytes, plan)
    return found if not proven else f"{found}, peak bound {proven[0]}"


def floor_parts(floor_bytes: int, plan: Plan | None) -> list[str]:
    """Returns the lowest reachable peak as text and, if it is known, the peak bound with the gap between the two.

    The lowest peak that any plan can have lies between them: a plan was found for the one, and no plan is below the other.
    """
    if plan is None or not plan.least_peak_bytes:
        return [format_bytes(floor_bytes)]
    unit = common_unit(floor_bytes, plan.least_peak_bytes)
    return [f"{format_bytes(floor_bytes, unit)} (found)", plan.peak_bound_text(unit, floor_bytes)]
