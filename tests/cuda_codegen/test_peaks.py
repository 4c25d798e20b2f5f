"""The memory model against Triton code: the first code that is emitted needs what its plan predicted."""

from __future__ import annotations

import pytest

from tests.cuda_codegen.conftest import Job

TOLERANCE = 0.01

CASES = [
    pytest.param("gpt", "bfloat16", ("0.5", "min"), id="gpt"),
    pytest.param("resnet", "bfloat16", ("min",), id="resnet"),
    pytest.param("unet", "float32", ("min",), id="unet"),
    pytest.param("unet", "bfloat16", ("min",), id="unet in bfloat16"),
]


@pytest.mark.parametrize(("model", "dtype", "budgets"), CASES)
def test_the_first_code_needs_what_was_predicted(job: Job, model: str, dtype: str, budgets: tuple[str, ...]) -> None:
    plain, *ours = job("benchmarks.common.fake_cuda.rows", model, dtype, "torch 1", *budgets)
    assert plain["first_peak_bytes"] > 0 and len(ours) == len(budgets)
    for row in ours:
        assert row["failure"] is None and row["rounds"] == 1
        assert row["first_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=TOLERANCE)
        assert row["first_peak_bytes"] < plain["first_peak_bytes"]
    options = ("--plan-only", "--plain", str(plain["first_peak_bytes"]))
    planned = job("benchmarks.common.fake_cuda.rows", model, dtype, *options, *budgets)
    assert [row["predicted_peak_bytes"] for row in planned] == [row["predicted_peak_bytes"] for row in ours]
