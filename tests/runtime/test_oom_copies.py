"""The copies that a second try after out-of-memory needs, and a budget in bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat.backend import remat
from compile_remat.device.measure import peak_bytes
from compile_remat.runtime.process_state import clear_process_state

CHANNELS = 64
COPIED_BYTES = 4 * (2 * 4 * CHANNELS + 8)
"""Bytes of the running statistics of four norms, and of their counters of batches."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers)


def _peaks(budget: int | str) -> tuple[int, int]:
    """Peaks of a second step: measured, without the four bytes of the loss's gradient, and of the code by a dry run."""
    torch.compiler.reset()
    clear_process_state()
    compile_remat.reset_reports()
    model, x = _model(), torch.randn(4096, CHANNELS)
    step = torch.compile(lambda x: model(x).square().mean(), backend=remat, options={"memory_budget": budget})
    step(x).backward()
    model.zero_grad()
    measured = peak_bytes(lambda: step(x).backward(), "cpu").peak_bytes
    (report,) = compile_remat.reports()
    assert report.scheduled_peak_bytes is not None
    return measured - 4, report.scheduled_peak_bytes


@pytest.mark.full
@pytest.mark.usefixtures("own_caches", "empty_kernels")
def test_copies_for_a_second_try_keep_a_budget_in_bytes() -> None:
    measured, lowest = _peaks("min")
    assert measured - lowest <= COPIED_BYTES
    exact, scheduled = _peaks(lowest)
    assert exact <= scheduled == lowest  # no room
    with_room, scheduled = _peaks(lowest + COPIED_BYTES)
    assert scheduled <= with_room <= lowest + COPIED_BYTES
