"""Stored rows whose plan has changed since.  Nothing is compiled: a row is planned again, for its stored budget in bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.common.harness import ascii_table, mib
from benchmarks.common.result_rows import Row
from benchmarks.models import Case

TITLES = ("model", "setting", "budget", "stored", "now", "stored extra ms", "now", "differs in")


@dataclass(frozen=True)
class StaleRow:
    """A stored row, and what planning gives for it now: peak or floor, and the plan's extra time."""

    stored: Row
    fresh: Row

    @property
    def differs_in(self) -> list[str]:
        """The figures in which the two plans differ; times to a millionth, as they are sums of floats."""
        names = ["predicted_peak_bytes", "floor_bytes"]
        found = [name for name in names if getattr(self.stored, name) != getattr(self.fresh, name)]
        times = [row.extra_ns or 0.0 for row in (self.stored, self.fresh)]
        is_other_time = abs(times[0] - times[1]) > 1e-6 * max(times)
        return found + (["extra_ns"] if is_other_time and self.stored.predicted_peak_bytes else [])


def planned_again(row: Row, build: Callable[[], Case]) -> Row:
    """One of our rows with the figures of a fresh plan.

    Args:
        build: Makes the row's model and inputs.
    """
    from compile_remat.api import look
    from compile_remat.errors import BudgetError

    torch.compiler.reset()
    case = build()
    fresh = replace(row, predicted_peak_bytes=None, extra_ns=None, floor_bytes=None)
    try:
        planned = look(case.module, case.inputs, memory_budget=row.budget_bytes or "min")
    except BudgetError as error:
        return replace(fresh, floor_bytes=error.floor_bytes)
    report = max((each.report for each in planned), key=lambda report: report.predicted_peak_bytes or 0)
    return replace(fresh, predicted_peak_bytes=report.predicted_peak_bytes, extra_ns=report.extra_time_ns)


def table(rows: Sequence[StaleRow]) -> str:
    """A line for each row."""
    return ascii_table(TITLES, [_cells(row) for row in rows])


def _cells(row: StaleRow) -> list[str]:
    stored, fresh = row.stored, row.fresh
    return [
        stored.model,
        stored.setting,
        mib(stored.budget_bytes),
        _peak_text(stored),
        _peak_text(fresh),
        *("-" if each.extra_ns is None else f"{each.extra_ns / 1e6:.3f}" for each in (stored, fresh)),
        ", ".join(row.differs_in),
    ]


def _peak_text(row: Row) -> str:
    """In bytes: plans may differ by less than a MiB."""
    if row.floor_bytes is not None:
        return f"floor {row.floor_bytes}"
    return str(row.failure or row.predicted_peak_bytes)
