"""Extra time has one base, plain torch.compile's own plan, wherever it is printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_remat.budget import MemoryBudget
from compile_remat.cli.plan import print_baselines, print_forecast
from compile_remat.forecast.baselines import DEFAULT
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.device_choice import compare_devices
from compile_remat.forecast.forecasting import Forecast, forecast
from compile_remat.forecast.target_step import Target
from compile_remat.pages.figures import PLAIN

LLAMA = Builder("tests.planned_models:llama", dtype="bf16")
CONVOLUTION = Builder("tests.planned_models:convolution")
H100 = Target("h100-sxm", estimate=True)


@pytest.fixture(scope="module", params=["llama", "convolution"])
def compared(request: pytest.FixtureRequest) -> Forecast:
    """Gradients of convolutions are split for budgets: plain torch.compile is priced in the graph that the plan has."""
    builder = LLAMA if request.param == "llama" else CONVOLUTION
    target = replace(H100, budget=MemoryBudget.parse(0.9))
    return forecast(builder, target, with_baselines=True, with_max_batch=False)


def test_torchs_default_is_the_zero_of_both_tables(compared: Forecast, capsys: pytest.CaptureFixture[str]) -> None:
    (default,) = (c for c in compared.compared if c.name == DEFAULT)
    assert compared.plan.base.name == PLAIN and {c.ours.base for c in compared.compared} == {compared.plan.base}
    assert default.time_ns == compared.plan.plain_time_ns and default.extra_share == 0 >= default.ours.extra_share
    for c in compared.compared:
        assert c.ours.bound_share <= c.ours.extra_share <= c.extra_share
    print_forecast(compared)
    print_baselines(compared)
    printed = capsys.readouterr().out
    (row,) = (line.split() for line in printed.splitlines() if line.strip().startswith(DEFAULT))
    assert row[5] == "+0.00%" and f"step, {PLAIN}" in printed


def test_the_frontier_of_a_page_has_the_zero_of_its_facts(compared: Forecast) -> None:
    figures = compared.figures(points=3)
    (chosen,) = (p for p in figures.frontier if p.is_chosen)
    assert figures.base == compared.plan.base and chosen.time_ns == compared.plan.time_ns
    assert f"({figures.base.share_of(chosen.time_ns):+.2%})" in dict(figures.facts)["extra time"]


def test_a_cpu_without_a_budget_takes_no_longer_than_plain_torch_compile() -> None:
    plan = forecast(replace(LLAMA, dtype=None), Target("cpu", estimate=True), with_max_batch=False).plan
    assert plan.extra_time_ns > 0 >= plan.extra_share  # some plan of another size is faster than both
    assert plan.recomputed
    text = dict(plan.figures().facts)["recomputed"]
    assert f"({PLAIN}: " in text  # the text says why recompute is no extra time


def test_the_largest_batch_and_other_devices_have_the_same_base() -> None:
    (row,) = compare_devices(LLAMA, [H100])
    assert row.largest is not None and row.largest.plan is not None
    assert row.plan.base.name == row.largest.plan.base.name == PLAIN
    assert row.plan.plain_time_ns == forecast(LLAMA, H100, with_max_batch=False).plan.plain_time_ns
    assert row.largest.plan.plain_time_ns > 2 * row.plan.plain_time_ns  # type: ignore[operator]
