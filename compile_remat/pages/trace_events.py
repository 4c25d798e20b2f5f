"""Writes a predicted training step in the Trace Event Format, which Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open.

Source of the format: "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
complete events (``X``), counters (``C``) and metadata (``M``); times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compile_remat.pages.figures import PageFigures, StepFigures

PROCESS, FORWARD, BACKWARD = 0, 1, 2
"""The process id of the trace, and its thread ids."""


def chrome_trace(figures: PageFigures) -> dict[str, Any]:
    """Returns a trace with one event per node, and counters of live bytes: the plan's by kind, and the total of the other plan.

    Raises:
        ValueError: The tensors of the plan are unknown.
    """
    step = figures.known_step()
    names = {PROCESS: f"{figures.title} (predicted)", FORWARD: "forward", BACKWARD: "backward"}
    events = [
        _event("M", "thread_name" if thread else "process_name", tid=thread, args={"name": name})
        for thread, name in names.items()
    ]
    events += [*_nodes(step), *_live_bytes(step, figures.budget_bytes)]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(figures.facts)}


def _event(phase: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": PROCESS, "name": name, **fields}


def _nodes(step: StepFigures) -> Iterator[dict[str, Any]]:
    made = {(t.name, t.begin): t for t in step.tensors}
    forward, live_bytes = set(step.columns[: step.num_forward]), step.live_bytes
    for column, (name, start_ns, time_ns) in enumerate(zip(step.columns, step.starts_ns, step.times_ns, strict=True)):
        thread = FORWARD if column < step.num_forward else BACKWARD
        category = "forward" if thread == FORWARD else "recomputed" if name in forward else "backward"
        arguments: dict[str, Any] = {"live bytes": live_bytes[column]}
        if (tensor := made.get((name, column))) is not None:
            arguments |= {"bytes": tensor.nbytes, "shape": list(tensor.shape), "dtype": tensor.dtype}
            arguments |= {"fate": tensor.fate, "module": tensor.module_path, "source": tensor.source_line}
        yield _event("X", name, tid=thread, cat=category, ts=start_ns / 1e3, dur=time_ns / 1e3, args=arguments)


def _live_bytes(step: StepFigures, budget_bytes: int | None) -> Iterator[dict[str, Any]]:
    for column, start_ns in enumerate(step.starts_ns):
        counters = {"live bytes": {str(kind): area[column] for kind, area in step.areas.items()}}
        if step.other is not None:
            counters[f"live bytes of {step.other.label}"] = {"bytes": step.other.live_bytes[column]}
        if budget_bytes is not None:
            counters["budget"] = {"bytes": budget_bytes}
        for name, arguments in counters.items():
            yield _event("C", name, ts=start_ns / 1e3, args=arguments)
