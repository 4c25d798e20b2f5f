"""Announces a plan while a model compiles: log lines under ``REMAT_LOG=info``, and artifacts of torch's structured log."""

from __future__ import annotations

import logging

from compile_remat._torch.structured_trace import trace_artifact
from compile_remat._util.text_table import format_table
from compile_remat._util.units import format_bytes, format_time
from compile_remat.report import Report

LOG = logging.getLogger("compile_remat")

ARTIFACT = "compile_remat_plan"
"""Name of the plan's artifact in tlparse."""

HEADS = ("module", "saved", "bytes", "recomputed", "bytes", "time", "share")


def announce(report: Report) -> None:
    """Log a report with a table of its modules, and add both to torch's structured log."""
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%s", text_of(report))
    trace_artifact(ARTIFACT, "json", report.to_json)
    trace_artifact(f"{ARTIFACT}_text", "string", lambda: text_of(report))


def text_of(report: Report) -> str:
    """Returns the report, with a table of the values that its plan saves and recomputes in each module, equal layers in one row."""
    plan = report.plan
    if plan is None or plan.pictures is None:
        return str(report)
    rows = [
        (
            row.path or "(no module)",
            str(row.num_saved),
            format_bytes(row.saved_bytes),
            str(row.num_recomputed),
            format_bytes(row.recomputed_bytes),
            format_time(row.recompute_time_ns),
            f"{row.recompute_time_ns / max(1, plan.time_ns):.1%}",
        )
        for row in plan.pictures.modules(plan)
    ]
    return f"{report}\n{format_table('', HEADS, rows)}" if rows else str(report)
