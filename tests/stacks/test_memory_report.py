"""The output of the callbacks, for a step that runs operator by operator."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_remat
from compile_remat.integrations import MemoryReport


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
    graph, step, largest = report.text.splitlines()
    assert graph.startswith("Net: memory_budget min (-), predicted peak 0.")
    assert graph.endswith(f" MiB, graph {found.graph_key}")
    assert step.startswith("forward and backward: measured peak 0.")
    assert largest.startswith("largest batch on l4: ") and int(largest.split()[-1]) > 256
    assert capsys.readouterr().out.count("largest batch") == 1
    assert found.plan is not None and found.measured_peak_bytes and found.predicted_peak_bytes
    assert report.figures() == {  # `min` stands for no number of bytes
        "remat_measured_mib": found.measured_peak_bytes / 2**20,
        "remat_predicted_mib": found.predicted_peak_bytes / 2**20,
        "remat_extra_share": pytest.approx(found.plan.extra_share),
    }
    assert report.postfix() == f"peak {found.measured_peak_bytes / 2**20:.1f} MiB"


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
