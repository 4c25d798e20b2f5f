"""What a compiled step will really ask for: both of its graphs' code run dry, and put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from compile_remat._torch.sizes import sizes_at, storage_nbytes
from compile_remat._util.units import format_bytes
from compile_remat.errors import BudgetError, warn
from compile_remat.inductor.observe import Emitted
from compile_remat.inductor.wrapper_dry_run import DryRun, NotUnderstood, dry_run
from compile_remat.passes import Status
from compile_remat.planning.budget_source import source_of
from compile_remat.planning.request import Request, target_bytes_of
from compile_remat.planning.settings import Settings
from compile_remat.report import Report, joined

LOG = logging.getLogger("compile_remat")


NARROWINGS = 4
"""Dry runs that look for the largest sizes at which the emitted code keeps the budget, at most."""


class Emissions:
    """Collects what Inductor emits for one compilation."""

    def __init__(self) -> None:
        self.seen: list[Emitted] = []

    def __call__(self, emitted: Emitted) -> None:
        """Take in one graph's code."""
        self.seen.append(emitted)

    def peak_bytes(self) -> int | None:
        """The region peak of the final code, or None where it is not one forward and one backward, or cannot be followed."""
        forwards = [e for e in self.seen if not e.is_backward]
        backwards = [e for e in self.seen if e.is_backward]
        if len(forwards) != 1 or len(backwards) != 1:
            return None
        return self._known(lambda: scheduled_peak_bytes(forwards[0], backwards[0]))

    def unsplit_peak_bytes(self) -> int | None:
        """The peak of a graph that was not split into forward and backward; None where it cannot be followed."""
        if len(self.seen) != 1:
            return None
        return self._known(lambda: dry_run(self.seen[0].source_code, self.seen[0].inputs).peak_bytes)

    def _known(self, peak_bytes: Callable[[], int]) -> int | None:
        try:
            return peak_bytes()
        except NotUnderstood as error:
            LOG.info("the scheduled peak is not known: %s", error)
        except (
            Exception
        ):  # Inductor's code may hold anything, and a figure that is missing must not stop a training run
            LOG.warning("the scheduled peak is not known: the dry run failed", exc_info=True)
        return None


def scheduled_peak_bytes(forward: Emitted, backward: Emitted) -> int:
    """The most bytes live at once between the entry of the forward and the end of the backward.

    What the forward returns to the user counts until the backward ends, as a training loop holds it; what it saves, until
    the backward drops it.  Inputs of the forward and tangents do not count: they are not the compiled graphs'.  But where the
    backward reads an output itself, no loop can drop that before its tangent is there: then both count.

    Raises:
        NotUnderstood: A dry run cannot follow the code, or the two graphs do not belong together.
    """
    first = dry_run(forward.source_code, forward.inputs)
    outputs, saved = _split(forward, backward, first)
    held = dict(filter(None, outputs))
    counted: dict[int, tuple[int, int]] = {}
    read_again: list[int] = []  # bytes of outputs that are saved as well
    for position, name in enumerate(backward.names):
        storage = saved.get(name)
        if storage is not None and storage[0] not in held:
            counted[position] = storage
        elif storage is not None:
            read_again.append(storage[1])
    for position, nbytes in _tangents(backward):
        if nbytes in read_again:
            read_again.remove(nbytes)
            counted[position] = (-1 - position, nbytes)  # a number that no storage of the forward has
    second = dry_run(backward.source_code, backward.inputs, counted)
    return max(first.peak_bytes, sum(held.values()) + second.peak_bytes)


def _tangents(backward: Emitted) -> list[tuple[int, int]]:
    """Positions of the gradients that come in, and their bytes."""
    found = [(k, backward.inputs[k]) for k, name in enumerate(backward.names) if name.startswith("tangents_")]
    return [(k, storage_nbytes(t)) for k, t in found if isinstance(t, torch.Tensor)]


def _split(
    forward: Emitted, backward: Emitted, run: DryRun
) -> tuple[list[tuple[int, int] | None], dict[str, tuple[int, int] | None]]:
    """Storages of the user's outputs, and of what is saved by its name in the backward.

    The forward returns outputs, then saved tensors, then saved sizes; the backward takes sizes, tensors, tangents.
    """
    handed = [k for k, name in enumerate(backward.names) if not name.startswith("tangents_")]
    sizes = [k for k in handed if isinstance(backward.inputs[k], int | torch.SymInt)]
    tensors = [k for k in handed if k not in sizes]
    num_outputs = forward.num_outputs - len(handed)
    if num_outputs < 0 or len(run.returned) != forward.num_outputs:
        raise NotUnderstood("forward and backward do not hand over the same values")
    handed_storages = run.returned[num_outputs : num_outputs + len(tensors)]
    saved = {backward.names[k]: storage for k, storage in zip(tensors, handed_storages, strict=True)}
    return list(run.returned[:num_outputs]), saved


# -- against the budget -----------------------------------------------------------------------------------------------


def with_scheduled_peak(reports: Sequence[Report], emissions: Emissions) -> list[Report]:
    """The reports of one compilation; a single one gets the peak of the code that was emitted."""
    peak_bytes = emissions.peak_bytes() if len(reports) == 1 else None
    return list(reports) if peak_bytes is None else [replace(reports[0], scheduled_peak_bytes=peak_bytes)]


def with_scheduled_range(reports: Sequence[Report], emissions: Emissions) -> list[Report]:
    """The reports, with the box of sizes narrowed to where the emitted code keeps a budget in bytes, too."""
    if len(reports) != 1:
        return list(reports)
    report = reports[0]
    found, limit_bytes, before = report.size_range, report.budget_bytes, report.scheduled_peak_bytes
    if found is None or limit_bytes is None or before is None:
        return [report]
    upper = found.upper
    for _ in range(NARROWINGS):
        with sizes_at(zip(found.names, upper, strict=True)):
            peak_bytes = emissions.peak_bytes()
        if peak_bytes is None or peak_bytes <= limit_bytes:
            break
        part = max(0, limit_bytes - before) / (peak_bytes - before) if peak_bytes > before else 0
        upper = tuple(low + int(part * (high - low)) for low, high in zip(found.planned, upper, strict=True))
    else:
        upper = found.planned
    return [replace(report, size_range=replace(found, upper=upper))]


def bytes_to_plan_for(reports: Sequence[Report], request: Request) -> int | None:
    """What to plan for so that the code stays inside the budget; None where it does, or where no plan could be lower.

    A pinned plan stays: the user wants this one.
    """
    excess_bytes = _excess_bytes(reports)
    if excess_bytes <= 0 or _is_lowest(reports[0]):
        return None
    plan = reports[0].plan
    assert plan is not None and plan.budget_bytes is not None
    if plan.status in (Status.REPLAYED, Status.FALLBACK):
        return None
    target_bytes = target_bytes_of(request)
    return min(plan.budget_bytes if target_bytes is None else target_bytes, plan.peak_bytes) - excess_bytes


def settle(reports: Sequence[Report], settings: Settings, request: Request) -> list[Report]:
    """The reports of the code that runs, with a note where it was planned for less than the budget, or needs more.

    Raises:
        BudgetError: The user gave the budget in bytes, and even the code of the lowest plan needs more.
    """
    excess_bytes = _excess_bytes(reports)
    if excess_bytes <= 0:
        target_bytes = target_bytes_of(request)
        if target_bytes is None:
            return list(reports)
        text = f"planned for {format_bytes(target_bytes)}, as Inductor's code for the budget needed more than it"
        return [replace(report, message=joined(report.message, text)) for report in reports]
    report = reports[0]
    assert report.plan is not None and report.budget_bytes is not None and report.scheduled_peak_bytes is not None
    if _is_lowest(report) and settings.is_given and not source_of(settings.budget, from_auto=settings.from_auto):
        largest = report.plan.largest
        raise BudgetError(report.budget_bytes, report.scheduled_peak_bytes, largest)
    text = f"Inductor's code needs {format_bytes(report.scheduled_peak_bytes)}, which is {format_bytes(excess_bytes)} too much"
    warn(text)
    return [replace(report, message=joined(report.message, text))]


def _excess_bytes(reports: Sequence[Report]) -> int:
    """By how much the code exceeds the budget; 0 or less where it does not, or where either is unknown."""
    if len(reports) != 1 or reports[0].plan is None:
        return 0
    budget_bytes, peak_bytes = reports[0].budget_bytes, reports[0].scheduled_peak_bytes
    return 0 if budget_bytes is None or peak_bytes is None else peak_bytes - budget_bytes


def _is_lowest(report: Report) -> bool:
    return report.plan is not None and report.floor_bytes is not None and report.plan.peak_bytes <= report.floor_bytes
