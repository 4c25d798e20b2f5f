"""Gradients that an earlier micro-batch has left lie beside the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat.backend import remat
from compile_remat.device.measure import peak_bytes

WIDTH, BATCH = 128, 256


@pytest.mark.usefixtures("empty_kernels")
def test_two_micro_batches_peak_at_the_plans_peak_and_the_gradients_of_the_first() -> None:
    layers = (layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    x = torch.randn(BATCH, WIDTH)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    plain_bytes = compile_remat.explain(model, x, memory_budget="max", compiler="eager").predicted_peak_bytes
    assert plain_bytes is not None
    budget_bytes = max(1 << 20, int(0.8 * plain_bytes))
    compiled = torch.compile(model, backend=remat, options={"memory_budget": budget_bytes})

    def micro_batch() -> None:
        compiled(x).sum().backward()

    def peak_of(micro_batches: int) -> int:
        model.zero_grad()
        return peak_bytes(lambda: [micro_batch() for _ in range(micro_batches)], "cpu").peak_bytes

    micro_batch()
    (report,) = compile_remat.reports()
    assert report.plan is not None and report.plan.peak_bytes < plain_bytes
    one, two = peak_of(1), peak_of(2)
    assert one == pytest.approx(report.plan.peak_bytes, rel=0.01) and one <= budget_bytes
    assert two == pytest.approx(report.plan.peak_bytes + gradient_bytes, rel=0.01) and two > budget_bytes
