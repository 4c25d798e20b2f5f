"""Assertions that two runs agree, and that our reports keep their budgets."""

from __future__ import annotations

import math

import torch

import compile_remat
from compile_remat.budget import MemoryBudget
from tests.correctness.harness import Observed


class NumbersDiffer(AssertionError):
    """Two runs gave a tensor with other numbers."""


def assert_same(actual: Observed, expected: Observed, tolerance: float, where: str) -> None:
    """Equal by name; the tolerance of a tensor is a part of its largest element, or of 1.

    Raises:
        NumbersDiffer: A tensor differs by more.
        AssertionError: A name, a type or a number that is no tensor differs.
    """
    assert actual.keys() == expected.keys(), where
    for name, wanted in expected.items():
        found = actual[name]
        if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
            assert type(found) is type(wanted) and found == wanted, f"{where}: {name}: {found} instead of {wanted}"
            continue
        largest = float(wanted.abs().max()) if wanted.numel() and wanted.dtype.is_floating_point else 0.0
        atol = tolerance * (max(1.0, largest) if math.isfinite(largest) else 1.0)
        try:
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise NumbersDiffer(f"{where}: {name}: {error}") from None


def assert_promise_holds(budget: float | str | int) -> None:
    """Each graph has a report, and no predicted peak exceeds the budget, or the lowest peak if a fraction asks for less."""
    reports = compile_remat.reports()
    assert reports, "no graph was planned"
    for report in reports:
        assert report.budget == str(MemoryBudget.parse(budget))
        if report.status == "NOT_PLANNED":
            continue  # between graph breaks, a graph may have no backward
        if isinstance(budget, float) and report.predicted_peak_bytes == report.floor_bytes:
            continue  # a fraction below the floor: the lowest plan
        assert report.plan.is_feasible
        assert report.budget_bytes is None or report.predicted_peak_bytes <= report.budget_bytes
