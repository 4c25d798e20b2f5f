"""Prices count the bytes that fused kernels move, in Triton code for an H100: of single norms, and of models of several blocks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_codegen.conftest import Job

ERRORS = {
    ("gpt", "max"): -0.03,
    ("llama", "max"): -0.06,
    ("bert", "max"): -0.02,
    ("vit", "max"): -0.03,
    ("resnet", "max"): -0.08,
    ("unet", "max"): 0.11,
    ("convnext", "max"): -0.39,
    ("gpt", "0.5"): 0.02,
    ("llama", "0.5"): -0.07,
    ("gpt", "min"): -0.06,
    ("llama", "min"): -0.08,
    ("vit", "min"): -0.12,
}
"""Of models under a budget, the error of the bytes by prices.

A price splits the loads of a kernel among its nodes before a plan is known: it cannot know which of a kernel's operands the plan
saves.  ConvNeXt: its code copies whole tensors between layouts, and copies have no price.
"""


def error(row: dict[str, Any]) -> float:
    return sum(row["priced"]) / sum(row["emitted"]) - 1


@pytest.mark.full
def test_prices_count_the_bytes_of_norms(job: Job) -> None:
    """Within 2 % of the sum of both graphs."""
    errors = {row["name"]: error(row) for row in job("tests.cuda_codegen.jobs.priced")}
    assert len(errors) == 11
    assert not {name: each for name, each in errors.items() if abs(each) > 0.02}


@pytest.mark.full
@pytest.mark.parametrize(("name", "budget"), ERRORS)
def test_prices_of_models_are_as_good_as_said(job: Job, name: str, budget: str) -> None:
    (row,) = job("tests.cuda_codegen.jobs.priced", name, "--budget", budget)
    assert abs(error(row) - ERRORS[name, budget]) < 0.02
