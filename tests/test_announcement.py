"""The announcement of a plan: a table in the log, and artifacts that tlparse shows beside torch's."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import compile_remat
from compile_remat import announcement
from compile_remat.announcement import ARTIFACT, said_if_slow, text_of
from compile_remat.report import Report

PROGRAM = """
import torch
from torch import nn

layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
options = {"memory_budget": 0.7, "compiler": "eager"}
torch.compile(nn.Sequential(*layers), backend="remat", options=options)(torch.randn(512, 64)).sum().backward()
"""


def test_one_table_for_a_graph_with_equal_layers_as_one_row(
    own_caches: object, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
    options = {"memory_budget": 0.7, "compiler": "eager"}
    with caplog.at_level(logging.INFO, "compile_remat"):
        torch.compile(model, backend="remat", options=options)(torch.randn(512, 64)).sum().backward()
    (report,) = compile_remat.reports()
    (text,) = (record.getMessage() for record in caplog.records if "planned in" in record.getMessage())
    assert text == text_of(replace(report, caveat=""))  # it is not known yet how the plan runs
    head, *rows = text.partition("\nmodule ")[2].splitlines()
    assert head.split() == ["saved", "bytes", "recomputed", "bytes", "time", "share"]
    cells = [row.split("  ") for row in rows[1:]]
    assert len(rows) < 6 and any("-" in cell[0] for cell in cells)
    assert report.plan is not None and report.plan.pictures is not None
    modules = report.plan.pictures.modules(report.plan)
    assert len(cells) == len(modules) and sum(row.saved_bytes for row in modules) == report.plan.saved_bytes


def test_without_a_plan_the_report_alone() -> None:
    report = Report("key", "min", None, None)
    assert text_of(report) == str(report)


def test_tlparse_shows_the_plan(tmp_path: Path) -> None:
    """Beside the graphs of the same compilation, with no line that it does not understand."""
    command = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if command is None:
        pytest.skip("tlparse is not installed")
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path / "trace"), "REMAT_LOG": "none"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True)
    (log,) = (tmp_path / "trace").iterdir()
    pages = tmp_path / "pages"
    subprocess.run([command, log, "-o", pages, "--no-browser", "--strict"], check=True, capture_output=True)
    (plan,) = pages.glob(f"*/{ARTIFACT}_[0-9]*.json")
    report = Report.from_json(plan.read_text())
    assert report.plan is not None and 0 < report.plan.peak_bytes <= (report.budget_bytes or 0)
    assert list(plan.parent.glob("aot_joint_graph_*.txt"))
    (text,) = plan.parent.glob(f"{ARTIFACT}_text_*.txt")
    assert "predicted peak" in text.read_text() and "recomputed" in text.read_text()
    index = json.loads((pages / "compile_directory.json").read_text())
    assert ARTIFACT in json.dumps(index)


# -- planning that takes long -----------------------------------------------------------------------------------------


def graph_of(function: object) -> fx.Graph:
    return fx.symbolic_trace(function).graph  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit_s", "seconds", "said"), [(0.01, 0.3, 1), (60.0, 0.0, 0)], ids=["slow", "quick"])
def test_only_slow_planning_is_said_and_once(
    limit_s: float, seconds: float, said: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcement, "SILENT_S", limit_s)
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError), said_if_slow(graph_of(lambda x: x.sin().cos()), "planning"):
        time.sleep(seconds)
        raise ZeroDivisionError
    assert threading.active_count() == threads
    assert [record.levelname for record in caplog.records] == ["WARNING"] * said
    assert (
        caplog.messages == ["planning a graph (2 operators) ... REMAT_LOG=info shows the plan when it is found"] * said
    )


def test_a_step_and_explain_say_it_once_for_a_graph(
    uncached: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcement, "SILENT_S", 0.001)
    options = {"memory_budget": "min", "compiler": "eager"}
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(16, 8)
    step = torch.compile(model, backend="remat", options=options)
    for _ in range(2):
        step(x).sum().backward()
    compile_remat.explain(model, x, **options)
    (first, second) = [text for text in caplog.messages if text.startswith("planning")]
    assert first.startswith("planning and compiling Sequential (3 operators) ...")
    assert second.startswith("planning Sequential (3 operators) ...")
