"""Emitted Triton kernels, run in Triton's interpreter on CPU tensors, give eager mode's loss and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_codegen.conftest import Job


@pytest.mark.parametrize(
    ("budget", "dtype", "dropout"),
    [("max", "float32", False), ("min", "float32", True), ("max", "bfloat16", True), ("min", "bfloat16", False)],
)
def test_gradients_are_those_of_eager_mode(job: Job, tmp_path: Path, budget: str, dtype: str, dropout: bool) -> None:
    """Numbers that the backward would draw again are others under torch 2.13: see `InductorRules.draws_by_kernel`."""
    case = {"budget": budget, "dtype": dtype, "dropout": dropout, "out": str(tmp_path / "emitted.pickle")}
    (emitted,) = job("tests.cuda_codegen.jobs.emit", case)
    assert emitted["graphs"] == 2 and emitted["triton_kernels"] > 15
    (found,) = job("tests.cuda_codegen.jobs.interpret", case, TRITON_INTERPRET="1")
    assert found["gradients"] == 21
    assert found["error"] <= max(1.5 * found["eager_error"], 2e-6)
    assert found["loss_error"] < (1e-6 if dtype == "float32" else 1e-2)
