"""Writes a predicted training step in the Trace Event Format, which Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open.

Source of the format: "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
complete events (``X``), counters (``C``) and metadata (``M``); times are microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile_remat._util.atomic_write import write_atomically
from compile_remat.pages.figures import PageFigures, StepFigures

PROCESS = 0
FORWARD, BACKWARD = 1, 2
"""Thread ids in the trace."""


def chrome_trace(figures: PageFigures) -> dict[str, Any]:
    """Returns a trace with one event per node, and counters of live bytes: the plan's by kind, and the total of the other plan.

    Raises:
        ValueError: The tensors of the plan are unknown.
    """
    step = figures.known_step()
    events = [*_names(figures), *_nodes(step), *_live_bytes(step, figures.budget_bytes)]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(figures.facts)}


def write_trace(figures: PageFigures, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON; raises OSError if that fails, and ValueError as `chrome_trace`."""
    write_atomically(Path(path), json.dumps(chrome_trace(figures)))


def _names(figures: PageFigures) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": f"{figures.title} (predicted)"}}
    for thread, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
        yield {"ph": "M", "pid": PROCESS, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _nodes(step: StepFigures) -> Iterator[dict[str, Any]]:
    made = {(t.name, t.begin): t for t in step.tensors}
    again = set(step.columns[: step.num_forward])
    for column, (name, start_ns, time_ns) in enumerate(zip(step.columns, step.starts_ns, step.times_ns, strict=True)):
        in_forward = column < step.num_forward
        tensor = made.get((name, column))
        arguments: dict[str, Any] = {"live bytes": step.live_bytes[column]}
        if tensor is not None:
            arguments |= {
                "bytes": tensor.nbytes,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "fate": tensor.fate,
                "module": tensor.module_path,
                "source": tensor.source_line,
            }
        yield {
            "ph": "X",
            "pid": PROCESS,
            "tid": FORWARD if in_forward else BACKWARD,
            "name": name,
            "cat": "forward" if in_forward else "recomputed" if name in again else "backward",
            "ts": start_ns / 1e3,
            "dur": time_ns / 1e3,
            "args": arguments,
        }


def _live_bytes(step: StepFigures, budget_bytes: int | None) -> Iterator[dict[str, Any]]:
    for column, start_ns in enumerate(step.starts_ns):
        counters = {"live bytes": {str(kind): area[column] for kind, area in step.areas.items()}}
        if step.other is not None:
            counters[f"live bytes of {step.other.label}"] = {"bytes": step.other.live_bytes[column]}
        if budget_bytes is not None:
            counters["budget"] = {"bytes": budget_bytes}
        for name, arguments in counters.items():
            yield {"ph": "C", "pid": PROCESS, "name": name, "ts": start_ns / 1e3, "args": arguments}
