"""Compares the peak of a compiled step, from dry runs of both graphs' code, with the budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from compile_remat._torch.sizes import sizes_at
from compile_remat._util.units import format_bytes, in_one_unit
from compile_remat.compilation.region_run import RegionRun, run_region, run_unsplit
from compile_remat.errors import BudgetError, warn
from compile_remat.inductor.observe import Emitted
from compile_remat.inductor.wrapper_dry_run import NotUnderstood
from compile_remat.passes import Status
from compile_remat.passes.pictures.plan_pictures import PlanPictures
from compile_remat.planning.budget_source import EffectiveBudget, below_floor_text, checkpoints_text, source_of
from compile_remat.planning.request import LOWEST, Request, target_bytes_of
from compile_remat.planning.settings import Settings
from compile_remat.report import Report, joined

LOG = logging.getLogger("compile_remat")


NARROWINGS = 4
"""Largest number of dry runs that search the largest sizes at which the emitted code keeps the budget."""


T = TypeVar("T")


class Emissions:
    """Collects the code that Inductor emits for one compilation."""

    def __init__(self) -> None:
        self.seen: list[Emitted] = []

    def __call__(self, emitted: Emitted) -> None:
        """Take in one graph's code."""
        self.seen.append(emitted)

    def region_run(self) -> RegionRun | None:
        """A dry run of the code; None unless it is one forward and one backward, or one graph of both, and is understood."""
        if len(self.seen) == 1 and self.seen[0].is_inference:
            return self._known(lambda: run_unsplit(self.seen[0]))
        forwards = [e for e in self.seen if not e.is_backward]
        backwards = [e for e in self.seen if e.is_backward]
        if len(forwards) != 1 or len(backwards) != 1:
            return None
        return self._known(lambda: run_region(forwards[0], backwards[0]))

    def _known(self, run: Callable[[], T]) -> T | None:
        try:
            return run()
        except NotUnderstood as error:
            LOG.info("the scheduled peak is not known: %s", error)
        except (
            Exception
        ):  # Inductor's code may hold anything, and a figure that is missing must not stop a training run
            LOG.warning("the scheduled peak is not known: the dry run failed", exc_info=True)
        return None


# -- against the budget -----------------------------------------------------------------------------------------------


def with_scheduled_peak(reports: Sequence[Report], emissions: Emissions) -> list[Report]:
    """The reports of one compilation; a single report gets the peak of the emitted code."""
    run = emissions.region_run() if len(reports) == 1 else None
    return list(reports) if run is None else [with_run(reports[0], run)]


def with_run(report: Report, run: RegionRun) -> Report:
    """The report with the peak of a dry run and, on CUDA, with the bytes that the allocator reserves and requires."""
    report = replace(report, scheduled_peak_bytes=run.peak_bytes)
    if not run.is_cuda:
        return report
    held = run.reservation
    reserved_bytes, required_bytes = held.reserved_peak_bytes, held.required_peak_bytes
    return replace(report, reserved_peak_bytes=reserved_bytes, required_peak_bytes=required_bytes)


def with_scheduled_range(reports: Sequence[Report], emissions: Emissions) -> list[Report]:
    """The reports; a single report gets its box of sizes narrowed to sizes at which the emitted code keeps the budget, too."""
    if len(reports) != 1:
        return list(reports)
    report = reports[0]
    found, limit_bytes, before = report.size_range, report.budget_bytes, report.scheduled_peak_bytes
    if found is None or limit_bytes is None or before is None:
        return [report]
    upper = found.upper
    for _ in range(NARROWINGS):
        with sizes_at(zip(found.names, upper, strict=True)):
            run = emissions.region_run()
        if run is None or run.peak_bytes <= limit_bytes:
            break
        peak_bytes = run.peak_bytes
        part = max(0, limit_bytes - before) / (peak_bytes - before) if peak_bytes > before else 0
        upper = tuple(low + int(part * (high - low)) for low, high in zip(found.planned, upper, strict=True))
    else:
        upper = found.planned
    return [replace(report, size_range=replace(found, upper=upper))]


def bytes_to_plan_for(reports: Sequence[Report], settings: Settings, request: Request) -> int | None:
    """The target at which the code should stay inside the budget; None if the code already does, or no plan could be lower.

    None also for a replayed plan, which the user wants, for a fallback, and for a graph that needs a menu of plans.
    """
    excess_bytes = _excess_bytes(reports, settings)
    if excess_bytes <= 0 or is_lowest(reports[0]) or reports[0].offers:
        return None
    plan = reports[0].plan
    assert plan is not None and plan.budget_bytes is not None
    if plan.status in (Status.REPLAYED, Status.FALLBACK):
        return None
    target_bytes = target_bytes_of(request)
    return min(plan.budget_bytes if target_bytes is None else target_bytes, plan.peak_bytes) - excess_bytes


def settle(reports: Sequence[Report], settings: Settings, request: Request) -> list[Report]:
    """The reports of the code that runs, with a message if it was planned for less than the budget, or needs more.

    Raises:
        BudgetError: The user gave the budget in bytes, and even the code of the lowest plan needs more.
    """
    excess_bytes = _excess_bytes(reports, settings)
    if excess_bytes <= 0:
        target_bytes = target_bytes_of(request)
        if target_bytes is None:
            return list(reports)
        if target_bytes == LOWEST.target_bytes:
            text = "no plan was predicted to fit, but the code of the lowest plan does"
            return [replace(report, message=joined(report.message, text)) for report in reports]
        text = f"planned for {format_bytes(target_bytes)}, as Inductor's code for the budget needed more than it"
        return [replace(report, message=joined(report.message, text)) for report in reports]
    report, limit_bytes = reports[0], _limit_bytes(reports[0])
    assert limit_bytes is not None
    if is_lowest(report):
        check_floor(report, settings)
        return [_below_floor(report, settings, limit_bytes + excess_bytes)]
    needed, excess = in_one_unit(limit_bytes + excess_bytes, excess_bytes)
    limit = "the budget" if report.left_bytes is None else "what the step's other graphs leave of the budget"
    text = f"Inductor's code needs {needed}, which is {excess} above {limit}"
    warn(text)
    return [replace(report, message=joined(report.message, text))]


def _below_floor(report: Report, settings: Settings, needed_bytes: int) -> Report:
    """The report of the lowest plan, with a message about a budget that may be exceeded: `auto`, a fraction, one of torch's ratios.

    If the planner has said so already, its floor gives way to the bytes that the code needs; else there is a warning.
    """
    source = source_of(settings.budget, from_auto=settings.from_auto) or "torch's activation memory budget"
    plain_bytes = 0
    if report.plain is not None and not settings.from_auto:
        plain_bytes = max(settings.plain_bytes, report.plain.peak_bytes)
    budget = EffectiveBudget(settings.budget, source=source, plain_bytes=plain_bytes)
    assert report.budget_bytes is not None and report.plan is not None
    text = below_floor_text(budget, report.budget_bytes, needed_bytes)
    planned = below_floor_text(budget, report.budget_bytes, report.plan.peak_bytes)
    if planned in report.message:
        return replace(report, message=report.message.replace(planned, text))
    if isinstance(report.plan.pictures, PlanPictures):
        text = joined(text, checkpoints_text(budget, report.plan.pictures.problem))
    warn(text)
    return replace(report, message=joined(report.message, text))


def check_floor(lowest: Report, settings: Settings, error: BudgetError | None = None) -> None:
    """Raise if a budget that the user gave in bytes is too low even for the lowest plan.

    Args:
        lowest: Report of the lowest plan, with the peak of its code, or of its lowered graphs.
        error: The planner's error for this budget, if there was one.

    Raises:
        BudgetError: `error`, or a new error, with the peak of the lowest plan as its floor.
    """
    may_miss = not settings.is_given or source_of(settings.budget, from_auto=settings.from_auto)
    if may_miss or not is_too_large(lowest, settings):
        return
    budget_bytes, peak_bytes, plan = lowest.budget_bytes, lowest.scheduled_peak_bytes, lowest.plan
    assert budget_bytes is not None and peak_bytes is not None and plan is not None
    found = error or BudgetError(budget_bytes, peak_bytes, plan.largest, settings.budget.written)
    raise found.with_floor(peak_bytes, plan.largest)


def _excess_bytes(reports: Sequence[Report], settings: Settings) -> int:
    """Bytes by which the code exceeds the budget; 0 or less if it does not, 0 if either figure is unknown.

    Under `auto`, the budget is free memory, which has to hold the allocator's segments with all gaps in them.
    """
    if len(reports) != 1 or reports[0].plan is None:
        return 0
    limit_bytes, peak_bytes = _limit_bytes(reports[0]), reports[0].scheduled_peak_bytes
    if limit_bytes is None or peak_bytes is None:
        return 0
    required_bytes = reports[0].required_peak_bytes if settings.from_auto else None
    return max(peak_bytes, required_bytes or 0) - limit_bytes


def _limit_bytes(report: Report) -> int | None:
    return report.left_bytes if report.budget_bytes is None else report.budget_bytes


def is_too_large(report: Report, settings: Settings) -> bool:
    """Returns whether the code needs more than the budget."""
    return _excess_bytes([report], settings) > 0


def is_lowest(report: Report) -> bool:
    """Returns whether the plan is the lowest that the planner knows of."""
    return report.plan is not None and report.floor_bytes is not None and report.plan.peak_bytes <= report.floor_bytes
