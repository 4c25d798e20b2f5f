"""The command as it is installed, given in a folder that holds nothing but a model of the user's."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

MODEL = """
import os

import torch

os.chdir("data")
os.environ["LAYERS"] = os.environ.get("LAYERS", "") + "2"


def build(batch=64):
    assert os.environ["LAYERS"] == "2"
    layers = (torch.nn.Linear(16, 16) for _ in range(2))
    return torch.nn.Sequential(*layers), (torch.randn(batch, 16),)
"""

SCRIPT = Path(sysconfig.get_path("scripts")) / "compile-remat"
TIMEOUT_S = 300.0


@pytest.mark.parametrize(
    "program",
    [
        pytest.param([str(SCRIPT)], id="script"),
        pytest.param([sys.executable, "-m", "compile_remat"], id="module", marks=pytest.mark.full),
    ],
)
def test_a_model_is_found_where_the_command_is_given(program: list[str], tmp_path: Path) -> None:
    """Both processes find the model, even if importing the model changes the environment that the next process would see."""
    if not SCRIPT.exists():
        pytest.skip("the command is not installed")
    (tmp_path / "data").mkdir()
    (tmp_path / "mymodel.py").write_text(MODEL)
    given = [*program, "plan", "mymodel:build", "--device", "l4"]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(given, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    (largest,) = (line.split() for line in done.stdout.splitlines() if line.strip().startswith("largest batch"))
    assert int(largest[2]) > 64
