"""`benchmarks.gpu_peaks` on a CPU: rows of a model that compiles quickly, and what a table of rows shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import gpu_peaks
from benchmarks.gpu_peaks import PeakRow, cells, rows_here, summary
from benchmarks.models import codegen
from benchmarks.models.building import Built

MIB = 1 << 20


def chain() -> Built:
    """3 x (Linear 64, GELU), batch 4096"""
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(4096, 64),)


def broken() -> Built:
    """Cannot be built"""
    raise ValueError("no such layer")


def test_rows_of_a_model(monkeypatch: pytest.MonkeyPatch, own_caches: Path) -> None:
    monkeypatch.setitem(codegen.CASES, "chain", chain)
    plain, lowest, refused = rows_here("chain", "float32", ("plain", "min", "0.3"), 0, "cpu")
    assert plain.peak_bytes and plain.predicted_peak_bytes is None and plain.gradient_difference is None
    assert lowest.peak_bytes and lowest.peak_bytes < plain.peak_bytes and lowest.failure is None
    assert lowest.error == pytest.approx(0, abs=0.01) and lowest.dry_run_error == pytest.approx(0, abs=0.01)
    assert lowest.gradient_difference is not None and lowest.gradient_difference < 1e-5 and lowest.rounds == 1
    assert refused.budget_bytes == int(0.3 * plain.peak_bytes)
    assert refused.floor_bytes == pytest.approx(lowest.predicted_peak_bytes, rel=0.01) and refused.peak_bytes is None


def test_what_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codegen.CASES, "broken", broken)
    (row,) = rows_here("broken", "float32", ("plain",), 0, "cpu")
    assert row.failure == "ValueError: no such layer" and row.peak_bytes is None


def test_what_rows_show() -> None:
    row = PeakRow(
        "gpt", "bfloat16", "0.5", 50 * MIB, 0, 50 * MIB, predicted_peak_bytes=49 * MIB, scheduled_peak_bytes=50 * MIB
    )
    assert row.error == pytest.approx(-0.02) and row.dry_run_error == 0 and not row.is_over
    over = replace(row, peak_bytes=51 * MIB)
    assert over.is_over and "above the budget" in cells(over)[-1]
    assert len(cells(row)) == len(gpu_peaks.TITLES)
    text = summary([row, over, replace(row, peak_bytes=None, failure="OutOfMemoryError: none")])
    assert "above the budget: 1 of 3 rows" in text and "gpt bfloat16 0.5: OutOfMemoryError: none" in text
    assert "error of the prediction: median 2.96%, worst 3.92% (-3.92% to -2.00%), 2 rows" in text
