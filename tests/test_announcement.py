"""The announcement of a plan: a table in the log, and artifacts that tlparse shows beside torch's."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat.announcement import ARTIFACT, text_of
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
