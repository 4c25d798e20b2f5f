"""Peaks and step times of one model under plain torch.compile, torch's own budget, and ours, a row for each.

`plain` is torch.compile with default options, `torch B` is `torch._functorch.config.activation_memory_budget = B`, the rest is
`backend="remat"`.  Every row is compiled afresh.  Planning time is everything between receiving the joint graph and handing over
two modules, for torch's rows as for ours.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.code_only import compile_code, plain_peak_bytes, without_compiler
from benchmarks.common.harness import mib
from benchmarks.common.result_rows import Row, lowest_peak
from benchmarks.common.torch_budget import TorchPartition, timed_torch_partitioner, torch_activation_budget

TORCH_BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0)
FRACTIONS = (0.8, 0.6, 0.4, 0.3)


class Runner:
    """Compiles one model again and again, each time from a fresh state.

    With `once`, a budget at which torch makes the same choice as at an earlier budget takes the earlier figures. With `hold`,
    steps hold their output.
    """

    def __init__(
        self,
        name: str,
        arguments: argparse.Namespace,
        *,
        once: bool = False,
        hold: bool = False,
        dtype: str = "float32",
    ) -> None:
        self._name = name
        self._arguments = arguments
        self._once, self._hold, self._dtype = once, hold, dtype
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], Row] = {}

    def plain(self) -> Row:
        return self._row("plain", "default", None, harness.plain)

    def torch_budget(self, value: float) -> Row:
        log: list[TorchPartition] = []
        options = {"custom_partitioner_fn": timed_torch_partitioner(log, lambda each: _choice(each) in self._known)}
        with torch_activation_budget(value):
            row = self._row(
                "torch",
                f"{value:g}",
                None,
                lambda case: harness.training(case, options=options),
                lambda: {"planning_ns": sum(partition.time_ns for partition in log)},
            )
        if len(log) != 1 or not self._once:
            return row
        known = self._known.get(_choice(log[0]))
        if known is not None:
            return replace(known, setting=row.setting, planning_ns=log[0].time_ns)
        if row.failure is None:
            self._known[_choice(log[0])] = row
        return row

    def remat(self, setting: str, memory_budget: int | str) -> Row:
        budget_bytes = memory_budget if isinstance(memory_budget, int) else None
        return self._row("remat", setting, budget_bytes, lambda case: harness.remat(case, memory_budget), report_fields)

    def case(self) -> models.Case:
        """The model and its inputs, made anew."""
        given = self._arguments
        scale = harness.scale_of(given)
        return models.build(self._name, device=given.device, scale=scale, seed=given.seed, dtype=self._dtype)

    def _row(
        self,
        kind: str,
        setting: str,
        budget_bytes: int | None,
        make: Callable[[models.Case], harness.Training],
        extra_fields: Callable[[], dict[str, Any]] = dict,
    ) -> Row:
        harness.progress(f"{self._name}: {kind} {setting}")
        fresh_state(kind)
        arguments = self._arguments
        base = Row(self._name, kind, setting, budget_bytes)
        try:
            run = replace(make(self.case()), holds_output=self._hold)
            measured = harness.measure(run, arguments.device, arguments.steps)
        except Exception as error:  # one broken row must not lose the others; its verdict is a miss
            return replace(base, **failure_fields(error))
        return replace(
            base,
            peak_bytes=measured.peak.peak_bytes,
            requested_bytes=measured.peak.requested_bytes,
            gradient_bytes=measured.gradient_bytes,
            step_ns=measured.step_ns,
            first_step_s=measured.first_step_s,
            **extra_fields(),
        )


class CodeRunner(Runner):
    """Has code emitted and runs it dry: rows have a codegen peak in place of a measured one.  Nothing is built."""

    def plain(self) -> Row:
        return self._of_code("plain", "default", None)

    def remat(self, setting: str, memory_budget: int | str) -> Row:
        return self._of_code("remat", setting, memory_budget)

    def _of_code(self, kind: str, setting: str, memory_budget: int | str | None) -> Row:
        harness.progress(f"{self._name}: code of {kind} {setting}")
        fresh_state(kind)
        row = Row(self._name, kind, setting, memory_budget if isinstance(memory_budget, int) else None)
        try:
            case = self.case()
            with warnings.catch_warnings(action="ignore"), without_compiler():  # torch says that its caches are off
                if memory_budget is None:
                    return replace(row, scheduled_peak_bytes=plain_peak_bytes(case.module, case.inputs))
                compile_code(case.module, case.inputs, memory_budget)
        except Exception as error:  # as for measured rows
            return replace(row, **failure_fields(error))
        return replace(row, **report_fields())


def _choice(partition: TorchPartition) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return partition.saved, partition.recomputed


def fresh_state(kind: str) -> None:
    torch.compiler.reset()
    if kind == "remat":
        import compile_remat

        compile_remat.reset_reports()


def report_fields() -> dict[str, Any]:
    """Figures of the report of the one compiled graph of these models."""
    import compile_remat

    report = max(compile_remat.reports(), key=lambda each: each.predicted_peak_bytes or 0)
    return {
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "scheduled_peak_bytes": report.scheduled_peak_bytes,
        "recompute_ns": report.recompute_time_ns,
        "extra_ns": report.extra_time_ns,
        "gap": report.gap,
        "planning_ns": report.planning_time_s * 1e9,
        "status": str(report.status),
    }


def failure_fields(error: Exception) -> dict[str, Any]:
    """A BudgetError is an answer (its floor); anything else is a failure."""
    floor_bytes = getattr(error, "floor_bytes", None)
    if type(error).__name__ == "BudgetError" and floor_bytes is not None:
        return {"floor_bytes": int(floor_bytes)}
    return {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}


def floor_text(row: Row, rows: Sequence[Row]) -> str:
    assert row.floor_bytes is not None
    lowest = lowest_peak(rows)
    if lowest is None:
        return f"floor {mib(row.floor_bytes)}"
    return f"floor {mib(row.floor_bytes)} (min {mib(lowest)}, off {row.floor_bytes / lowest - 1:+.1%})"
