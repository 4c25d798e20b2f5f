"""Models of timm and diffusers, at toy size."""

from __future__ import annotations

import pytest
import torch

from tests.stacks.promise import assert_same, assert_within_budget, planned

LIBRARIES = {"resnet": "timm", "convnext": "timm", "swin": "timm", "unet": "diffusers"}
BUDGETS = {"convnext": 0.8, "resnet": 0.85}
"""Budgets other than 0.7: the lowest reachable peaks are 0.74 of plain's, and 0.79 on a processor with AVX2 alone."""


@pytest.mark.parametrize("name", LIBRARIES)
def test_losses_and_peak(name: str) -> None:
    library = LIBRARIES[name]
    pytest.importorskip(library, reason=f"{library} is not installed: make test-stacks")
    import vision_models

    expected = vision_models.train(name, None)
    torch.compiler.reset()
    assert_same(vision_models.train(name, BUDGETS.get(name, 0.7)), expected, rel=1e-4)
    (report,) = planned()
    assert_within_budget(report.measured_peak_bytes, report.budget_bytes)
