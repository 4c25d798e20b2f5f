"""What is said of a plan while a model compiles: lines under ``REMAT_LOG=info``, and artifacts of torch's structured log."""

from __future__ import annotations

import logging

from compile_remat._torch.structured_trace import trace_artifact
from compile_remat._util.text_table import format_table
from compile_remat._util.units import format_bytes, format_time
from compile_remat.report import Report

LOG = logging.getLogger("compile_remat")

ARTIFACT = "compile_remat_plan"
"""What tlparse calls the plan of a graph."""

HEADS = ("module", "saved", "bytes", "recomputed", "bytes", "time")


def announce(report: Report) -> None:
    """Log a report with a table of its modules, and put both beside torch's own artifacts."""
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%s", text_of(report))
    trace_artifact(ARTIFACT, "json", report.to_json)
    trace_artifact(f"{ARTIFACT}_text", "string", lambda: text_of(report))


def text_of(report: Report) -> str:
    """The report, and what its plan saves and computes again in each module; equal layers are one row."""
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
        )
        for row in plan.pictures.modules(plan)
    ]
    return f"{report}\n{format_table('', HEADS, rows)}" if rows else str(report)
