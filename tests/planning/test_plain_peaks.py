"""The base of a fractional budget."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat import PlannerWarning
from compile_remat.backend import remat
from compile_remat.planning.plain_peaks import largest_plain_bytes, note_plain_bytes
from compile_remat.runtime.process_state import clear_process_state


def test_it_rises_by_device_and_never_falls() -> None:
    assert [note_plain_bytes("cpu", nbytes) for nbytes in (5, 3, 8)] == [5, 5, 8]
    assert (largest_plain_bytes("cpu"), largest_plain_bytes("h200")) == (8, 0)


@pytest.mark.usefixtures("empty_kernels")
def test_a_process_that_only_hits_caches_has_the_same_bytes() -> None:
    """Batches of 2, 512 and 40: the last batch gets the budget bytes of the second."""
    budgets = []
    for _ in range(2):
        torch.compiler.reset()
        clear_process_state()
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        call = torch.compile(model, backend=remat, options={"memory_budget": 0.8}, dynamic=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlannerWarning)
            for size in (2, 512, 40):
                call(torch.randn(size, 64)).sum().backward()
        budgets.append([report.budget_bytes for report in compile_remat.reports()])
    assert all(report.from_cache for report in compile_remat.reports())
    assert budgets[0] == budgets[1] and budgets[0][0] < budgets[0][1] == budgets[0][2]
