"""A forecast for a device that is not there: its peak is that of the Triton code that training would run."""

from __future__ import annotations

import pytest

from compile_remat.budget import MemoryBudget
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.forecasting import forecast
from compile_remat.forecast.frontier_forecast import forecast_frontier
from compile_remat.forecast.target_step import Target
from tests.cuda_codegen.conftest import Job

TOLERANCE_BYTES = 512
LLAMA = "tests.planned_models:llama"

CASES = [
    pytest.param(LLAMA, "bf16", ("0.7",), id="small", marks=pytest.mark.proof),
    pytest.param("benchmarks.models.codegen:gpt", "bf16", ("0.5", "min"), id="gpt", marks=pytest.mark.full),
    pytest.param("benchmarks.models.codegen:vit", "fp32", ("0.5", "min"), id="vit", marks=pytest.mark.full),
    pytest.param("benchmarks.models.codegen:unet", "fp32", ("min",), id="unet", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("source", "dtype", "budgets"), CASES)
def test_the_peak_is_that_of_the_code(source: str, dtype: str, budgets: tuple[str, ...], job: Job) -> None:
    emitted = job("benchmarks.common.fake_cuda.forecast_rows", source, dtype, *budgets)
    for budget, row in zip(budgets, emitted, strict=True):
        target = Target("h100-sxm", MemoryBudget.parse(budget))
        found = forecast(Builder(source, dtype=dtype), target, with_max_batch=False)
        assert found.facts == "observed", found.why
        assert abs(found.peak_bytes - row["peak_bytes"]) <= TOLERANCE_BYTES


@pytest.mark.full
def test_each_plan_of_a_frontier_is_observed(job: Job) -> None:
    found = forecast_frontier(Builder(LLAMA, dtype="bf16"), Target("h100-sxm"), 3)
    assert found.facts == "observed", found.why
    peaks = [point.observed_peak_bytes or 0 for point in found.points]
    times = [point.plan.time_ns for point in found.points]
    assert len(peaks) >= 2 and peaks == sorted(peaks, reverse=True) and times == sorted(times)
    (row,) = job("benchmarks.common.fake_cuda.forecast_rows", LLAMA, "bf16", "min")
    assert abs(peaks[-1] - row["peak_bytes"]) <= TOLERANCE_BYTES


@pytest.mark.full
def test_attention_whose_kernel_nobody_chooses_is_estimated(job: Job) -> None:
    """Without a driver Inductor's own attention is explicit products, which hold far more than what a device runs."""
    target = Target("h100-sxm", MemoryBudget("min"))
    found = forecast(Builder("tests.planned_models:softmaxes", dtype="bf16"), target, with_max_batch=False)
    assert found.facts == "estimated" and "attention of its softmaxes" in found.why
    assert found.plan.pictures is not None
