"""The output of the callbacks, for a step that runs operator by operator."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_remat
from compile_remat import MeasuredStep, Plan, PlannerWarning
from compile_remat._util.units import MIB
from compile_remat.integrations import MemoryReport
from compile_remat.integrations.batch_size import batch_bytes, batch_text
from compile_remat.passes import Status
from compile_remat.report import Report


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


def build(batch: int = 8) -> tuple[nn.Module, tuple[Any, ...]]:
    return Net(), (torch.randn(batch, 64),)


def test_budget_predicted_and_measured_peak_and_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    model, (x,) = build(256)
    model.compile(backend="remat", options={"compiler": "eager", "memory_budget": "min"})
    report = MemoryReport(step=2, build=build, device="l4", optimizer_state="adamw")
    for _ in range(3):
        report.begin()
        model(x).sum().backward()
        report.end()
        model.zero_grad()
    (found,) = compile_remat.reports()
    assert found.measured_peak_bytes == report.measured.peak_bytes
    step, graph, largest = report.text.splitlines()
    predicted, measured = (
        f"{(peak or 0) / 2**20:.1f} MiB" for peak in (found.predicted_peak_bytes, found.measured_peak_bytes)
    )
    figures = f"memory_budget min, predicted peak {predicted}, measured"
    assert step == f"forward and backward: {figures} peak {measured}"
    assert graph == f"Net: {figures} {measured}, graph {found.graph_key}"
    assert largest.startswith("largest batch on l4: ") and int(largest.split()[-1]) > 256
    assert capsys.readouterr().out.count("largest batch") == 1
    assert found.plan is not None and found.measured_peak_bytes and found.predicted_peak_bytes
    assert report.figures() == {  # `min` stands for no number of bytes
        "remat_measured_mib": found.measured_peak_bytes / 2**20,
        "remat_predicted_mib": found.predicted_peak_bytes / 2**20,
        "remat_extra_share": pytest.approx(found.plan.extra_share),
    }
    assert report.postfix() == f"peak {found.measured_peak_bytes / 2**20:.1f} MiB"


def of_graphs(monkeypatch: pytest.MonkeyPatch, measured_bytes: int, *reports: Report) -> MemoryReport:
    """A measured step in which graphs of these reports ran."""
    monkeypatch.setattr(compile_remat, "reports", lambda: reports)
    found = MemoryReport()
    found.measured = MeasuredStep(measured_bytes, [report.graph_key for report in reports])
    return found


def of_graph(key: str, peak_mib: float, budget: str = "0.5", **more: Any) -> Report:
    plan = Plan(key, Status.FEASIBLE, None, (), (), int(peak_mib * MIB), 0, 0, 0, 0, 0, 0)
    return Report(key, budget, None, plan, module="Net", **more)


def test_the_first_line_is_of_the_step_and_graphs_have_their_own_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs under one budget, after their plans were chosen together."""
    of_step = {"step_peak_bytes": 5 * MIB, "step_budget_bytes": 6 * MIB}
    report = of_graphs(monkeypatch, 5 * MIB, of_graph("a", 4.5, **of_step), of_graph("b", 0.5, **of_step))
    assert report.lines() == [
        "forward and backward: memory_budget 0.5 (6.0 MiB), predicted peak 5.0 MiB, measured peak 5.0 MiB",
        "Net: memory_budget 0.5, predicted peak 4.5 MiB, graph a",
        "Net: memory_budget 0.5, predicted peak 0.5 MiB, graph b",
    ]
    assert report.figures() == {"remat_measured_mib": 5, "remat_predicted_mib": 5, "remat_budget_mib": 6}


OUTSIDE = "lie outside of the compiled graphs, beside their budget"


@pytest.mark.parametrize(
    ("measured_mib", "of_step_mib", "outside_mib"),
    [(10.6, None, None), (10.9, None, None), (14, None, 4), (14, 8, 6), (8.9, 8, None)],
)
def test_a_peak_far_above_the_prediction_is_said_to_lie_outside_of_the_graphs(
    measured_mib: float, of_step_mib: int | None, outside_mib: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of 9 and 1 MiB take 10 together at the most; more than a tenth and more than 1 MiB above it is said."""
    more = {} if of_step_mib is None else {"step_peak_bytes": of_step_mib * MIB}
    graphs = [of_graph(key, mib, observed_peak_bytes=mib * MIB, **more) for key, mib in (("a", 9), ("b", 1))]
    lines = of_graphs(monkeypatch, int(measured_mib * MIB), *graphs).lines()
    assert [line.partition(" " + OUTSIDE)[0] for line in lines if OUTSIDE in line] == (
        [] if outside_mib is None else [f"about {outside_mib}.0 MiB"]
    )
    guide = Path(__file__).parents[2] / "docs" / "guides" / "trainer.md"
    assert "## Memory outside of the graphs\n" in guide.read_text()


def test_a_prediction_by_rules_alone_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `compiler="eager"`, whose warning says that tensors are missing in it."""
    assert OUTSIDE not in "".join(of_graphs(monkeypatch, 20 * MIB, of_graph("a", 9)).lines())


def test_one_warning_says_what_lies_outside_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction of 1 byte beside calls that take 2 and 4 MiB: the second line has another number."""
    report = of_graphs(monkeypatch, 0, of_graph("a", 0, observed_peak_bytes=1))
    report.step = 1
    with pytest.warns(PlannerWarning, match=f"about .* {OUTSIDE}") as caught:
        calls(report, 8192)
        first = report.text.splitlines()[1]
        calls(report, 16384)
    assert OUTSIDE in first and OUTSIDE in report.text and first != report.text.splitlines()[1]
    assert len([warning for warning in caught if OUTSIDE in str(warning.message)]) == 1


def test_gradients_that_accumulate_are_told_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 4 MiB is trained; the bias of 4 KiB is not."""
    report = of_graphs(monkeypatch, 5 * MIB, of_graph("a", 5))
    layer = nn.Linear(1024, 1024)
    layer.bias.requires_grad_(False)
    report.accumulates(1, layer.parameters())
    assert "micro-batches" not in "".join(report.lines())
    report.accumulates(2, layer.parameters())
    assert report.lines()[-1] == (
        "2 micro-batches in a step: from the second one on, 4.0 MiB of accumulated gradients lie beside the plan and its budget; "
        "see docs/guides/gradient-accumulation.md"
    )


@pytest.mark.parametrize(("budget", "text"), [("0.5", "0.5"), ("8MiB", "8MiB (8.0 MiB)"), ("min", "min")])
def test_the_bytes_that_a_setting_names_are_the_steps_before_plans_are_chosen_together(
    budget: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = of_graphs(monkeypatch, 5 * MIB, of_graph("a", 4.5, budget), of_graph("b", 0.5, budget))
    assert report.lines()[0] == (
        f"forward and backward: memory_budget {text}, predicted peak 4.5 MiB (of 2 graphs, the largest), measured peak 5.0 MiB"
    )
    assert report.figures().get("remat_budget_mib") == (8 if budget == "8MiB" else None)


def calls(report: MemoryReport, *sizes: int, model: Callable[[Tensor], Tensor] = torch.relu) -> None:
    """Calls of a model with batches of so many rows of 64 numbers."""
    for rows in sizes:
        x = torch.randn(rows, 64, requires_grad=True)
        report.begin({"x": x, "mask": [torch.ones(1)]})
        model(x).sum().backward()
        report.end()


def test_figures_are_those_of_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    report = MemoryReport(step=2)
    calls(report, 8, 4)
    assert report.batch == "x 4 x 64"
    of_four = report.figures()
    calls(report, 4, 8, 4, 8, 6)
    assert report.batch == "x 8 x 64"
    assert report.figures()["remat_measured_mib"] > of_four["remat_measured_mib"]
    assert capsys.readouterr().out.count("measured peak") == 0  # no graph has a plan
    assert (
        report.text
        == f"no graph with a plan: forward and backward took {report.measured.peak_bytes / 2**20:.1f} MiB at x 8 x 64"
    )


def test_a_call_that_compiled_is_measured_again(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.compile(Net(), backend="remat", dynamic=False, options={"compiler": "eager", "memory_budget": "min"})
    report = MemoryReport(step=1)
    calls(report, 8, model=model)
    assert "measured peak" in capsys.readouterr().out
    calls(report, 4, 8, 8, model=model)
    (text,) = [line for line in capsys.readouterr().out.splitlines() if "measured peak" in line]
    assert text.endswith(" at x 8 x 64")
    first = compile_remat.reports()[0]
    assert report.measured.ran == [first.graph_key] and report.measured.peak_bytes == first.measured_peak_bytes


def test_a_plan_for_larger_sizes_has_the_figure_of_its_own_call() -> None:
    """A plan for 8 rows, then one that is made for 4 of a varying number, then one for more rows in the same graph."""
    model = torch.compile(Net(), backend="remat", options={"compiler": "eager", "memory_budget": 0.5})
    report = MemoryReport(step=3)
    calls(report, 8, 4, 8, 8, model=model)
    _, of_four, of_more = compile_remat.reports()
    assert of_four.region == of_more.region and of_four.measured_peak_bytes is None
    assert report.measured.ran == [of_more.graph_key]
    assert of_more.measured_peak_bytes == report.measured.peak_bytes


@pytest.mark.parametrize(
    ("batch", "text", "nbytes"),
    [
        (None, "", 0),
        ("a text", "", 0),
        (torch.ones(3), "3", 12),
        ([torch.ones(2, 2), [torch.ones(4, 2)]], "4 x 2", 48),
        ({"a": {"b": torch.ones(2)}, "c": 1}, "b 2", 8),
    ],
)
def test_the_size_of_a_batch(batch: object, text: str, nbytes: int) -> None:
    assert (batch_text(batch), batch_bytes(batch)) == (text, nbytes)


def test_a_step_without_a_plan_says_only_what_was_measured() -> None:
    report = MemoryReport(step=1)
    assert report.figures() == {} and report.postfix() == ""
    report.begin()
    report.end()
    assert report.text == "no graph with a plan: forward and backward took 0 B"
    assert report.figures() == {"remat_measured_mib": 0.0}


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_missing_library_is_an_error_that_names_the_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment without it: no module of that name is found."""
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"compile_remat.integrations.{library}", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(library), *sys.meta_path])
    with pytest.raises(ImportError, match=rf"pip install 'compile-remat\[{library}\]'"):
        importlib.import_module(f"compile_remat.integrations.{library}")


class Absent(MetaPathFinder):
    """Hides a package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == self.package:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def test_the_package_imports_no_library_of_others() -> None:
    code = (
        "import sys, compile_remat, compile_remat.integrations; "
        "print(sorted({'transformers', 'lightning', 'accelerate', 'trl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_compiles_nothing_where_a_module_of_its_own_is_compiled_in_place() -> None:
    """Plain torch does the same, as the manual says.  If this test fails, the manual can drop the sentence."""
    x = torch.randn(4, 64)
    options = {"compiler": "eager", "memory_budget": "min"}
    body = Net().body
    body.compile(backend="remat", options=options)
    body(x).sum().backward()
    assert not compile_remat.reports()
    torch.compile(Net().body, backend="remat", options=options)(x).sum().backward()
    assert len(compile_remat.reports()) == 1
