"""Reports of graphs for which the budget may not hold: graphs without a plan, or with memory that no plan covers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from compile_remat._torch import cache_key_text
from compile_remat._util.units import format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.config import RematConfig
from compile_remat.errors import warn
from compile_remat.inductor.unplanned_graphs import (
    GRADIENTS_INSIDE,
    reason_without_plan,
    uncompiled_code,
    unmodelled_options,
)
from compile_remat.partitioning.joint_split import PlannerFailed, warn_of_fallback
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.passes.graph.inner_backward import backward_calls
from compile_remat.planning.settings import without_identity
from compile_remat.report import Report, record

UNFUSED = (
    "compiler = 'eager' runs operator by operator: tensors that Inductor would fuse into one kernel take memory as well. How much "
    "is not known before a step is measured (compile_remat.measured_step), and the predicted peak is without it"
)
"""Caveat of every plan that is not run by Inductor; the warning appears once in a process."""


def planned_inside(module: fx.GraphModule, partitioner: RematPartitioner) -> fx.GraphModule:
    """Under `install`: returns a graph for inference with its inner backward planned; a failure is reported with a warning.

    The code that is emitted for the graph is not compared with the budget.
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


def note_uncached(config: RematConfig) -> None:
    """Warn, once in a process, if a pass of the user has no identity: caches and `plan_dir` are not used."""
    if names := without_identity(config.joint_passes or ()):
        warn(
            f"joint_passes: {', '.join(names)} has no uuid(), so graphs are compiled without torch's caches and without plan_dir; "
            "define uuid() to have them"
        )


def unplanned(module: fx.GraphModule, budget: MemoryBudget, peak_bytes: int | None, reason: str = "") -> Report:
    """The report of a graph for which no partitioner was called, with a message if the budget does not hold.

    A graph without a backward saves nothing that a plan could recompute: its report says so, and has a message only if the graph's
    code needs more than the budget.

    Args:
        peak_bytes: The peak of the graph's code; None if unknown.
        reason: The reason why there is no plan; by default `reason_without_plan` finds it, which needs a Dynamo graph.
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
    """Reasons why the budget may not hold although the graph has a plan: uncompiled code, and options that no plan models."""
    unmodelled = unmodelled_options(patches) if compiler == "inductor" else [UNFUSED]
    return [*filter(None, [uncompiled_code(module)]), *unmodelled]


def with_caveats(report: Report, texts: Sequence[str]) -> Report:
    """The report of a planned graph with these caveats; warns of each, of `UNFUSED` not under the budget `min`."""
    if report.plan is None or not texts:
        return report
    for text in texts:
        if text != UNFUSED or report.budget != "min":
            warn(f"memory_budget may not hold, because {text}")
    return replace(report, caveat="; ".join(texts))
