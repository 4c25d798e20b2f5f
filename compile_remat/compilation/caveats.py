"""Reports of graphs for which the budget may not hold: they have no plan, or memory beside or after it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from compile_remat._torch import cache_key_text
from compile_remat._util.units import format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.errors import warn, warn_once
from compile_remat.inductor.unplanned_graphs import (
    GRADIENTS_INSIDE,
    reason_without_plan,
    uncompiled_code,
    unmodelled_options,
)
from compile_remat.passes import backward_calls
from compile_remat.planning.joint_split import PlannerFailed, warn_of_fallback
from compile_remat.planning.partitioner import RematPartitioner
from compile_remat.report import Report, record

UNFUSED = (
    "compiler = 'eager' runs operator by operator: values that the plan counts on Inductor to fuse take memory as well"
)
"""Of every plan that is not run by Inductor; said once in a process."""


def planned_inside(module: fx.GraphModule, partitioner: RematPartitioner) -> fx.GraphModule:
    """Under `install`: a graph for inference, the backward in it planned; where that cannot be, a report and a warning say so.

    The code that is emitted for it is not compared with the budget.
    """
    settings = partitioner.settings
    if not backward_calls(module) or not settings.has_limit(module):
        return module
    try:
        planned = replace(partitioner, guarded=True).with_copies(module)
    except PlannerFailed as error:
        warn_of_fallback(str(error))
        planned = module
    if planned is module:
        report = unplanned(module, settings.budget, None, GRADIENTS_INSIDE)
        warn(report.message)
        record(report)
    return planned


def unplanned(module: fx.GraphModule, budget: MemoryBudget, peak_bytes: int | None, reason: str = "") -> Report:
    """The report of a graph that no partitioner was called for; it has a message where the budget does not hold.

    A graph without a backward saves nothing that a plan could recompute: its report says so, and there is a message only where
    its code needs more than the budget.

    Args:
        peak_bytes: The peak of its code; None where that is not known.
        reason: Why there is no plan, where the graph is not Dynamo's, which says it itself.
    """
    reason = reason or reason_without_plan(module)
    budget_bytes = int(budget.value or 0) if budget.kind == "bytes" else None
    key = hashlib.sha256("\n".join(cache_key_text.graph_lines(module)).encode()).hexdigest()[:16]
    exceeds = budget_bytes is not None and peak_bytes is not None and peak_bytes > budget_bytes
    fits = budget_bytes is not None and peak_bytes is not None and peak_bytes <= budget_bytes
    message = ""
    if exceeds or (reason == GRADIENTS_INSIDE and not fits):
        needs = "" if peak_bytes is None else f"; its code needs {format_bytes(peak_bytes)}"
        message = f"memory_budget = {budget} does not hold for a graph that has no plan: {reason}{needs}"
    return Report(key, str(budget), budget_bytes, None, message=message, caveat=reason, scheduled_peak_bytes=peak_bytes)


def caveats_of(module: fx.GraphModule, patches: Mapping[str, Any], compiler: str) -> list[str]:
    """Why the budget may not hold though the graph has a plan: code beside it, and options that no plan takes account of."""
    unmodelled = unmodelled_options(patches) if compiler == "inductor" else [UNFUSED]
    return [*filter(None, [uncompiled_code(module)]), *unmodelled]


def with_caveats(report: Report, texts: Sequence[str]) -> Report:
    """The report of a planned graph with these caveats, and a warning for each: of `UNFUSED` once, if bytes may be exceeded."""
    if report.plan is None or not texts:
        return report
    for text in texts:
        if text != UNFUSED:
            warn(f"memory_budget may not hold, because {text}")
        elif report.budget != "min":
            warn_once(f"memory_budget may not hold, because {text}")
    return replace(report, caveat="; ".join(texts))
