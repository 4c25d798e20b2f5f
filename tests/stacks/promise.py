"""Assertions for every stack: measured peaks within the budget, and the losses of plain torch.compile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import compile_remat
from compile_remat import Report


def planned() -> list[Report]:
    """Reports of the graphs with a plan."""
    return [report for report in compile_remat.reports() if report.plan is not None]


def assert_within_budget(measured_bytes: int | None, budget_bytes: int | None, tolerance: float = 0.0) -> None:
    """A measured peak at or below the budget, give or take what the caller says and explains."""
    assert measured_bytes and budget_bytes
    assert measured_bytes <= budget_bytes * (1 + tolerance)


def assert_same(found: Sequence[float], expected: Sequence[float], rel: float = 1e-5) -> None:
    """The losses of two runs, step by step."""
    assert len(found) == len(expected) > 0
    assert list(found) == pytest.approx(list(expected), rel=rel)
