"""A step that is lowered for a CPU, as training lowers it."""

from __future__ import annotations

import pytest

from benchmarks.common.code_only import compile_code, without_compiler
from compile_remat import reports, reset_reports
from compile_remat.budget import MemoryBudget
from compile_remat.errors import BudgetError, RematError
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.forecasting import forecast
from compile_remat.forecast.lowering.observing import Asked, Observed, observe
from compile_remat.forecast.target_step import Target

LLAMA = Builder("tests.planned_models:llama", batch=2, dtype="fp32")
ATTENTION = Builder("tests.planned_models:attention", batch=2, dtype="fp32")
CPU = Target("cpu")


@pytest.mark.parametrize(
    ("builder", "budget"),
    [
        pytest.param(ATTENTION, "min", id="attention at min", marks=pytest.mark.proof),
        pytest.param(LLAMA, "min", id="llama at min", marks=pytest.mark.full),
        pytest.param(LLAMA, "0.7", id="llama at 0.7", marks=pytest.mark.full),
    ],
)
def test_an_observed_forecast_has_the_peak_of_the_code_that_trains(builder: Builder, budget: str) -> None:
    found = forecast(builder, Target("cpu", MemoryBudget.parse(budget)), with_max_batch=False)
    assert found.facts == "observed" and found.why == "" and found.peak_bytes == found.observed_peak_bytes
    model, inputs = builder.build()
    reset_reports()
    with without_compiler():
        compile_code(model, inputs, budget)
    (report,) = reports()
    assert found.peak_bytes == report.scheduled_peak_bytes
    assert found.plan.saved == report.plan.saved  # type: ignore[union-attr]


@pytest.mark.full
def test_a_budget_that_no_lowered_plan_keeps_is_an_error_with_a_floor_that_was_read() -> None:
    lowest = observe(Asked(LLAMA, CPU, MemoryBudget("min")))
    refused = observe(Asked(LLAMA, CPU, MemoryBudget("bytes", 100_000)))
    assert isinstance(lowest, Observed) and isinstance(refused, BudgetError)
    assert refused.floor_bytes == lowest.peak_bytes
    missed = observe(Asked(LLAMA, CPU, MemoryBudget("bytes", 100_000), from_auto=True))
    assert isinstance(missed, Observed) and "lowest" in missed.report.message


@pytest.mark.parametrize(
    ("name", "text"), [("broken", "falls into 2 graphs"), ("frozen", "has no graph with a backward")]
)
def test_what_is_not_one_graph_is_an_error(name: str, text: str) -> None:
    with pytest.raises(RematError, match=text):
        observe(Asked(Builder(f"tests.planned_models:{name}"), CPU, MemoryBudget("min")))
