"""The list that `reports()` returns: prints as a table, one row for each graph, wherever it is shown."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from compile_remat._util.text_table import format_table, rich_table
from compile_remat._util.units import common_unit, format_bytes, format_time

if TYPE_CHECKING:
    from compile_remat.report import Report

HEADS = ("module", "budget", "planned", "observed", "measured", "extra time", "status", "graph")
ALIGN = "lrrrrrll"
KEY = 8
"""Shown letters of the key of a graph, of sixteen: enough to find its file in `report_dir`."""

UNKNOWN = "(unknown)"
"""The name of a graph that was compiled outside of Dynamo."""

EMPTY = "No graph that trains is compiled yet: each has a row here after its first step."
UNMEASURED = (
    "measured: on a GPU in the first steps, elsewhere in a step inside of `with compile_remat.measured_step():`"
)


class Reports(list["Report"]):
    """A list of reports that prints as a table, in a terminal, in a notebook and through rich.

    A graph has one row for each plan that may run in the next step; plans that were replaced are in the list alone.  The peaks are
    the planner's (predicted), that of the graphs as Inductor lowered them (observed) and the allocator's in a step (measured).
    The extra time is the estimated time beyond the step of plain torch.compile, or of the fastest plan.

    Examples:
        >>> print(reports())  # doctest: +SKIP
        module     budget  predicted   observed   measured      extra time  status    graph
        ------  ---------  ---------  ---------  ---------  --------------  --------  --------
        GPT     120.0 MiB  118.6 MiB  118.6 MiB  118.6 MiB  +14.6%, 80 ms  FEASIBLE  64a5d06b
    """

    def __str__(self) -> str:
        rows = self.rows()
        if not rows:
            return EMPTY
        return "\n".join([format_table("", HEADS, rows, ALIGN), *self._notes()])

    __repr__ = __str__

    def __rich__(self) -> Any:
        """Returns the table for rich, which alone calls this."""
        rows = self.rows()
        return rich_table("\n".join(self._notes()), HEADS, rows, ALIGN) if rows else EMPTY

    def _repr_html_(self) -> str:
        """Returns the table as HTML, for notebooks."""
        rows = [_html_row("td", row) for row in self.rows()]
        notes = [f"<p>{html.escape(note)}</p>" for note in (self._notes() if rows else [EMPTY])]
        table = ["<table>", _html_row("th", HEADS), *rows, "</table>"] if rows else []
        return "".join([*table, *notes])

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the cells of the table under `HEADS`; all bytes of a row have one unit."""
        return [_row(report) for report in self._running()]

    def _running(self) -> list[Report]:
        """Returns the reports of plans that may run, and of a graph without such a plan the last one."""
        last = {report.region: report for report in self}
        busy = {report.region for report in self if report.runs_now}
        return [r for r in self if r.runs_now or (r is last[r.region] and r.region not in busy)]

    def _notes(self) -> list[str]:
        replaced = len(self) - len(self._running())
        notes = [f"and {replaced} plan{'s' * (replaced > 1)} that others replaced"] if replaced else []
        return notes + [UNMEASURED] * all(report.measured_peak_bytes is None for report in self)


def _row(report: Report) -> tuple[str, ...]:
    plan = report.plan
    peaks = (None if plan is None else plan.peak_bytes, report.observed_peak_bytes, report.measured_peak_bytes)
    unit = common_unit(report.budget_bytes, *peaks)
    cells = ["-" if nbytes is None else format_bytes(nbytes, unit) for nbytes in (report.budget_bytes, *peaks)]
    if report.budget_bytes is None:
        cells[0] = report.budget
    elif not report.budget.endswith(("B", "b")) and not report.budget.isdecimal():  # a fraction, or auto
        cells[0] = f"{report.budget} ({cells[0]})"
    extra = "-" if plan is None else f"{plan.extra_share:+.1%}, {format_time(plan.time_ns - plan.base.time_ns)}"
    status = report.status if report.runs_now else f"{report.status}, replaced"
    return (report.module or UNKNOWN, *cells, extra, status, report.graph_key[:KEY])


def _html_row(tag: str, cells: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
