"""nn.Transformer, an optimizer that is compiled beside the model, and a compiled training step: they need torch alone."""

from __future__ import annotations

import pytest
import torch
import torch_alone

import compile_remat
from tests.stacks.promise import assert_same, assert_within_budget, planned

pytestmark = pytest.mark.full


@pytest.mark.parametrize("what", torch_alone.WAYS)
def test_losses_and_peak(what: str) -> None:
    expected = torch_alone.train(what, None)
    torch.compiler.reset()
    assert_same(torch_alone.train(what, 0.5), expected)
    first = planned()[0]
    if what != "train_step":  # there the update is measured with the rest
        assert_within_budget(first.measured_peak_bytes, first.budget_bytes)
    statuses = [report.status for report in compile_remat.reports()]
    assert statuses[0] == "FEASIBLE"
    assert ("NOT_PLANNED" in statuses) == (what != "transformer")  # the update has no backward
