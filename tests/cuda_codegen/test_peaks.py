"""Reports against Triton code: the emitted code needs what the report predicts."""

from __future__ import annotations

import pytest

from tests.cuda_codegen.conftest import Job

TOLERANCE = 0.001

CASES = [
    pytest.param("gpt", "bfloat16", ("0.5", "min"), id="gpt"),
    pytest.param("resnet", "bfloat16", ("min",), id="resnet"),
    pytest.param("unet", "float32", ("min",), id="unet"),
    pytest.param("unet", "bfloat16", ("min",), id="unet in bfloat16"),
]

LOWEST = {
    ("gpt", "bfloat16"): 0.32,
    ("resnet", "bfloat16"): 0.52,
    ("unet", "float32"): 0.49,
    ("unet", "bfloat16"): 0.49,
}
"""Peak of `min` over plain's, with a hundredth of room: a plan that writes another value to memory is far above."""


@pytest.mark.parametrize(("model", "dtype", "budgets"), CASES)
def test_the_code_needs_what_the_report_predicts(job: Job, model: str, dtype: str, budgets: tuple[str, ...]) -> None:
    plain, *ours = job("benchmarks.common.fake_cuda.rows", model, dtype, "torch 1", *budgets)
    assert plain["peak_bytes"] > 0 and len(ours) == len(budgets)
    for row in ours:
        assert row["failure"] is None and row["rounds"] >= 1
        assert row["peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=TOLERANCE)
        assert row["peak_bytes"] <= (row["budget_bytes"] or plain["peak_bytes"])
        assert row["setting"] != "min" or row["peak_bytes"] < LOWEST[model, dtype] * plain["peak_bytes"]
