"""Fusions that raise memory below the graph's own peak: fewer kernels, less traffic, the same peak."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.emitted import DEVICE, EmittedRow
from tests.cuda_codegen.conftest import Job

SCALE = 0.25


@pytest.mark.parametrize(("model", "share"), [("gpt", 0.95), ("llama", 0.85)])
def test_the_guard_costs_no_peak_and_few_kernels(job: Job, model: str, share: float) -> None:
    def row(setting: str, *, guarded: bool = True) -> EmittedRow:
        blank = EmittedRow(model, setting, guarded, SCALE)
        (found,) = job("benchmarks.common.fake_cuda.emitted_row", json.dumps(asdict(blank)), str(DEVICE))
        assert found["failure"] is None
        return EmittedRow(**found)

    plain = row("plain")
    assert plain.fused and plain.products and plain.attentions and plain.moved_bytes and plain.peak_bytes
    assert sum(count for count, _ in (plain.families or {}).values()) == plain.fused and not plain.refused
    budget = str(int(share * plain.peak_bytes))
    ours, free = row(budget), row(budget, guarded=False)
    assert ours.peak_bytes == ours.predicted_peak_bytes and (ours.peak_bytes or 0) <= int(budget)
    assert ours.refused and not free.refused
    assert free.fused <= ours.fused <= 1.15 * free.fused
    assert ours.products >= plain.products
