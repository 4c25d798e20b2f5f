"""Calls for people: looking at plans without compiling, and Inductor itself with our partitioner."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor import metrics

import compile_remat
import compile_remat.backend
from compile_remat import (
    BudgetError,
    CheckWarning,
    ConfigError,
    DeviceError,
    RematError,
    Report,
    explain,
    install,
    pareto,
    uninstall,
)
from compile_remat._util.units import format_bytes
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.passes import Plan
from compile_remat.report import record


@pytest.fixture(autouse=True)
def _nothing_is_installed(uncached: None) -> Iterator[None]:
    yield
    uninstall()


def mlp(layers: int, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])


def convolutions(layers: int) -> nn.Module:
    torch.manual_seed(0)
    parts = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*[part for layer in parts for part in layer], nn.AdaptiveAvgPool2d(1), nn.Flatten())


X = torch.randn(512, 8)


# -- explain and plan -------------------------------------------------------------------------------------------------


def test_explain_compiles_nothing() -> None:
    kernels, counters = metrics.generated_kernel_count, dict(torch._dynamo.utils.counters["inductor"])
    report = explain(mlp(4), X, memory_budget="min")
    assert isinstance(report, Report)
    assert report.budget == "min" and report.num_recomputed > 0
    assert metrics.generated_kernel_count == kernels
    assert {k: n for k, n in torch._dynamo.utils.counters["inductor"].items() if "fxgraph" in k} == {
        k: n for k, n in counters.items() if "fxgraph" in k
    }
    assert compile_remat.reports() == []


def test_explain_leaves_the_model_as_it_was() -> None:
    model = mlp(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explain(model, X)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(model(X), mlp(2)(X))


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize("budget", [0.7, "min"])
def test_explain_tells_what_training_will_do(budget: object) -> None:
    report = explain(mlp(6), X, memory_budget=budget)
    assert report.plain is not None, "explain says what plain torch.compile takes, whatever the budget"
    call = torch.compile(mlp(6), backend=compile_remat.backend.remat, options={"memory_budget": budget})
    call(X).sum().backward()
    (trained,) = compile_remat.reports()
    assert (trained.graph_key, trained.plan) == (report.graph_key, report.plan)


def test_plan_is_the_plan_of_explain() -> None:
    first = compile_remat.plan(mlp(2), X, memory_budget="min")
    assert isinstance(first, Plan)
    assert first == explain(mlp(2), X, memory_budget="min").plan


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_page_has_the_figures_of_the_report(tmp_path: Path) -> None:
    report = explain(mlp(12), X, memory_budget=0.6)
    figures = report.figures(points=4)
    step = figures.step
    assert step is not None and step.other is not None and report.plain is not None and report.plan is not None
    assert max(step.live_bytes) == report.predicted_peak_bytes == dict(figures.peaks)["predicted peak"]
    assert (step.other.label, max(step.other.live_bytes)) == ("plain torch.compile", report.plain.peak_bytes)
    assert (figures.budget_bytes, figures.floor_bytes) == (report.budget_bytes, report.floor_bytes)
    assert sum(row.saved_bytes for row in figures.modules) == report.plan.saved_bytes
    (chosen,) = (point for point in figures.frontier if point.is_chosen)
    assert (chosen.peak_bytes, chosen.time_ns) == (report.plan.peak_bytes, report.plan.time_ns)
    assert min(point.peak_bytes for point in figures.frontier) <= chosen.peak_bytes
    saved = {t.name: t for t in step.tensors if t.kind == "saved"}
    assert all(t.module_path for t in saved.values())
    snapshots = {name for name in saved if name.startswith("snapshot_of_")}  # of biases, which the backward reads again
    assert {saved[name].shape for name in snapshots} <= {(8,)} and {
        saved[n].shape for n in saved.keys() - snapshots
    } == {(512, 8)}
    report.to_html(tmp_path / "page.html", points=0)
    text = (tmp_path / "page.html").read_text()
    assert format_bytes(report.plan.peak_bytes) in text and "<svg" in text


def test_a_page_for_a_budget_in_bytes_has_the_line_of_plain_torch_compile() -> None:
    report = explain(mlp(12), X, memory_budget="min")
    step = report.figures().known_step()
    assert report.plain is not None and step.other is not None and report.facts
    assert (step.other.label, max(step.other.live_bytes)) == ("plain torch.compile", report.plain.peak_bytes)


def test_plans_can_be_looked_at() -> None:
    model = mlp(3)
    for plan in (compile_remat.plan(model, X, memory_budget="min"), pareto(model, X, points=2)[-1]):
        assert "<svg" in plan._repr_html_()
    read = Plan.from_json(plan.to_json())
    assert read == plan and "<svg" not in read._repr_html_() and "read from JSON" in read._repr_html_()


@pytest.mark.usefixtures("empty_kernels")
def test_reports_of_training_can_be_looked_at() -> None:
    """If nobody asked for torch's own choice, it is unknown, and the figures show the fastest plan in its place."""
    torch.compile(mlp(4), backend=compile_remat.backend.remat, options={"memory_budget": "min"})(X).sum().backward()
    (report,) = compile_remat.reports()
    step = report.figures().step
    assert step is not None and step.other is not None and step.other.label == "the fastest plan"
    assert max(step.other.live_bytes) >= max(step.live_bytes) == report.predicted_peak_bytes
    assert Report.from_json(report.to_json()) == report


# -- the environment, devices -----------------------------------------------------------------------------------------


def test_explain_takes_functions_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_MEMORY_BUDGET", "min")
    x = torch.randn(16, requires_grad=True)
    assert explain(lambda x: torch.sin(torch.sin(x)), x).budget == "min"


def test_tensors_among_the_keywords_are_inputs_of_the_model() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (self.layer(input_ids).sin() - labels).square().mean()

    model, batch = Named(), {"input_ids": torch.ones(32, 64), "labels": torch.ones(32, 64)}
    report = compile_remat.explain(model, **batch, memory_budget="min")
    assert report.budget == "min" and report.plan is not None
    assert compile_remat.plan(model, **batch, memory_budget="min") == report.plan
    assert compile_remat.pareto(model, **batch, points=2)
    with pytest.raises(ConfigError, match="'labls' is not an option"):
        compile_remat.explain(model, **batch, labls=1)


def test_explain_plans_for_a_device_that_is_not_there() -> None:
    work = X.repeat(1024, 1)  # enough that a GPU's launches do not decide
    cpu, gpu = (explain(mlp(3), work, device=name) for name in ("cpu", "h200"))
    assert gpu.step_time_ns < cpu.step_time_ns


def test_explain_shows_the_lowest_plan_where_no_plan_fits() -> None:
    shown, lowest = (explain(mlp(3), X, memory_budget=budget) for budget in ("1KiB", "min"))
    assert shown.plan is not None and lowest.plan is not None
    assert (shown.plan.saved, shown.predicted_peak_bytes) == (lowest.plan.saved, lowest.predicted_peak_bytes)
    assert (shown.budget, shown.budget_bytes, shown.plan.budget_bytes) == ("1KiB", 1024, 1024)
    assert (shown.status, shown.plan.is_feasible, shown.floor_bytes) == ("OVER_BUDGET", False, lowest.floor_bytes)
    assert (
        "no plan fits memory_budget = 1KiB: " in shown.message
        and "(budget 1,024 bytes, " in shown.message
        and "the lowest plan" in shown.message
    )
    text = str(shown)
    assert "over budget: no plan found fits; this is the lowest one" in text and "feasible: fits" not in text
    assert re.search(r"\n  budget +1\.0 KiB\n", text), "not `none`, nor 0.0 MiB"
    assert lowest.floor_bytes is not None
    assert f"lowest reachable peak {format_bytes(lowest.floor_bytes)} (found" in text
    facts = dict(shown.figures().facts)
    assert facts["memory_budget"] == "1KiB" and facts["status"].startswith("over budget")
    with pytest.raises(BudgetError):
        compile_remat.plan(mlp(3), X, memory_budget="1KiB")


def test_explain_raises_what_training_would() -> None:
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(DeviceError):
        explain(mlp(3), X, device="h1000")
    with pytest.raises(ConfigError, match="memory_budget"):
        explain(mlp(3), X, memory_bugdet="max")


@pytest.mark.parametrize("look", [explain, compile_remat.plan, pareto])
def test_nothing_to_plan_is_an_error(look: Any) -> None:
    with torch.no_grad(), pytest.raises(RematError, match="nothing to plan"):
        look(mlp(2), X)
    with pytest.raises(RematError, match="nothing to plan"):
        look(torch.sin, X)


# -- pareto -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [mlp(16), nn.Sequential(*mlp(8), nn.Linear(8, 64), nn.GELU())], ids=["deep", "wide"])
def test_pareto_trades_time_for_memory(model: nn.Module) -> None:
    plans = pareto(model, X, points=6)
    assert len(plans) >= 3
    peaks, times = [p.peak_bytes for p in plans], [p.extra_time_ns for p in plans]
    assert peaks == sorted(set(peaks), reverse=True)
    assert times == sorted(times)
    assert times[0] == 0
    assert len({p.problem_key for p in plans}) == 1


def test_pareto_ends_at_the_fastest_and_the_lowest_plan() -> None:
    plans = pareto(mlp(12), X, points=4, memory_budget=0.9)  # a budget given here means nothing
    assert plans[0].peak_bytes == explain(mlp(12), X, memory_budget=1.0).predicted_peak_bytes
    assert plans[-1].peak_bytes <= explain(mlp(12), X, memory_budget="min").predicted_peak_bytes


@pytest.mark.proof
def test_min_is_the_lowest_of_all_plans() -> None:
    x = torch.randn(8, 4, 8, 8, dtype=torch.float64)
    lowest = explain(convolutions(4).double(), x, memory_budget="min")
    assert lowest.predicted_peak_bytes is not None
    within = explain(convolutions(4).double(), x, memory_budget=f"{int(1.1 * lowest.predicted_peak_bytes)} B")
    assert within.status == "FEASIBLE" and lowest.predicted_peak_bytes <= within.predicted_peak_bytes


# -- install ----------------------------------------------------------------------------------------------------------


def step(call: Any) -> None:
    call(X).sum().backward()


@pytest.mark.usefixtures("empty_kernels")
def test_install_and_uninstall() -> None:
    install(memory_budget="min")
    assert isinstance(inductor_config.custom_partitioner_fn, RematPartitioner)
    step(torch.compile(mlp(3)))
    (report,) = compile_remat.reports()
    assert report.budget == "min" and report.num_recomputed > 0
    uninstall()
    assert inductor_config.custom_partitioner_fn is None
    torch.compiler.reset()
    step(torch.compile(mlp(3)))
    assert len(compile_remat.reports()) == 1


@pytest.mark.usefixtures("empty_kernels")
def test_reports_are_written_under_install_until_it_is_undone(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    install(memory_budget="min", report_dir=folder)
    step(torch.compile(mlp(2)))
    (report,) = compile_remat.reports()
    assert [path.name for path in folder.iterdir()] == [f"{report.graph_key}.rank0.json"]
    uninstall()
    record(dataclasses.replace(report, graph_key="later"))
    assert len(list(folder.iterdir())) == 1


def test_install_leaves_inductor_as_it_was() -> None:
    before = inductor_config.get_config_copy()
    install(memory_budget="min")
    install(memory_budget=0.5)  # the second replaces the first
    assert not inductor_config.allow_buffer_reuse
    uninstall()
    uninstall()
    assert inductor_config.get_config_copy() == before


@pytest.mark.usefixtures("empty_kernels")
def test_a_fraction_that_a_small_graph_cannot_reach_stops_nothing_under_install() -> None:
    """As Accelerate's cast of the outputs, behind a graph break."""
    body = mlp(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = body(x)
        torch._dynamo.graph_break()
        return y.double()

    install(memory_budget=0.5)
    torch.compile(function)(X).sum().backward()
    assert len(compile_remat.reports()) == 2


@pytest.mark.full
def test_regions_that_are_compiled_once_have_right_gradients_under_install() -> None:
    """Plain torch 2.13 reuses the memory of what a region hands back to its backward."""

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.tanh(x) * x)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.cos(region(x * 1.5))
        return x

    def gradient(function: Any) -> torch.Tensor | None:
        x = torch.linspace(-1, 1, 4096).requires_grad_()
        function(x).sum().backward()
        return x.grad

    expected = gradient(chain)
    for budget in ("max", "min"):
        torch.compiler.reset()
        install(memory_budget=budget)
        torch.testing.assert_close(gradient(torch.compile(chain)), expected)
        uninstall()


def test_install_says_that_it_compares_nothing() -> None:
    with pytest.warns(CheckWarning, match="nothing is compared"):
        install(memory_budget="min", check=1)


def test_install_checks_its_settings() -> None:
    with pytest.raises(ConfigError):
        install(memory_budget="8 gigs")
    with pytest.raises(ConfigError, match="reduce-overhead"):
        install(mode="reduce-overhed")
    assert inductor_config.custom_partitioner_fn is None


@pytest.mark.proof
def test_gradients_are_right_under_install() -> None:
    model = mlp(3)
    step(model)
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    install(memory_budget="min")
    step(torch.compile(model))
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-5, atol=5e-5)  # other kernels


def test_explain_tells_of_each_node_what_was_assumed_and_observed() -> None:
    report = explain(mlp(3), X, memory_budget="min")
    assert {row.graph for row in report.facts} == {"forward", "backward"}
    live = [row.observed_live_bytes for row in report.facts if row.observed_live_bytes is not None]
    assert max(live) == report.observed_peak_bytes
    assert all(row.observed_bytes for row in report.facts if row.node == "mm" and row.graph == "forward")
    assert str(report.facts).splitlines()[0].split()[:2] == ["graph", "node"]
    assert not compile_remat.Report.from_json(report.to_json()).facts
