"""Announces a plan while a model compiles: log lines under ``REMAT_LOG=info``, and artifacts of torch's structured log.

At the default level there is one line for a graph whose planning takes long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from compile_remat._torch.dynamo.names import compiled_name
from compile_remat._torch.structured_trace import trace_artifact
from compile_remat._util.text_table import format_table
from compile_remat._util.units import format_bytes, format_time
from compile_remat.report import Report

LOG = logging.getLogger("compile_remat")

ARTIFACT = "compile_remat_plan"
"""Name of the plan's artifact in tlparse."""

HEADS = ("module", "saved", "bytes", "recomputed", "bytes", "time", "share")


SILENT_S = 5.0
"""Seconds of planning without a line in the log."""


@contextmanager
def said_if_slow(graph: fx.Graph, doing: str) -> Iterator[None]:
    """Log one line, shown by default, if this context takes longer than `SILENT_S`.

    Args:
        graph: The graph of Dynamo that is planned in this context; the line has its name and size.
        doing: The work, as in "planning".
    """
    operators = sum(node.op.startswith("call") for node in graph.nodes)
    text = f"{doing} {compiled_name(graph) or 'a graph'} ({operators:,} operators) ..."
    if not LOG.isEnabledFor(logging.INFO):
        text += " REMAT_LOG=info shows the plan when it is found"
    timer = threading.Timer(SILENT_S, LOG.warning, ["%s", text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


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
