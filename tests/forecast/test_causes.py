"""Errors in a user's model: one line with torch's own cause and the user's line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compile_remat.cost_models import load_device
from compile_remat.errors import RematError
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import trace

MODELS = """
import torch


class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.up = kind, torch.nn.Linear(64, 64)

    def forward(self, x):
        y = self.up(x)
        if self.kind == "item" and y.sum().item() > 0:
            y = 2 * y
        if self.kind == "raises":
            raise ValueError("x has to be\\nlonger")
        if self.kind == "prints":
            print("here")
        return self.up(y).mean()


def wrong_shape(batch=4):
    return Model(""), (torch.randn(batch, 65),)


def item(batch=4):
    return Model("item"), (torch.randn(batch, 64),)


def raises(batch=4):
    return Model("raises"), (torch.randn(batch, 64),)


def prints(batch=4):
    return Model("prints"), (torch.randn(batch, 64),)


def fails(batch=4):
    raise FileNotFoundError("weights.pt")


def two_texts(batch=4):
    return "a", "b"
"""

CASES = {
    "wrong_shape": "RuntimeError: a and b must have same reduction dim, but got [4, 65] X [64, 64]. ({file}:11: y = self.up(x))",
    "item": '(aten._local_scalar_dense.default) ({file}:12: if self.kind == "item" and y.sum().item() > 0:)',
    "raises": 'ValueError: x has to be longer ({file}:15: raise ValueError("x has to be\\nlonger"))',
    "prints": '({file}:17: print("here"))',
    "fails": "the builder models_that_fail:fails(batch=4) failed: FileNotFoundError: weights.pt ({file}:38: raise",
    "two_texts": "has to return a module and its inputs, not tuple of str, str.",
    "itme": "has no function 'itme'. Did you mean \"item\"?",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_that_fail.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("models_that_fail", "unimportable"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_fails_names_its_cause_and_its_line(name: str, folder: Path) -> None:
    with pytest.raises(RematError, match=re.escape(CASES[name].format(file="models_that_fail.py"))) as caught:
        trace(Builder(f"models_that_fail:{name}"), load_device("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize("name", ["wrong_shape", "item"])
def test_the_command_says_the_cause_and_nothing_of_torchs_log(name: str, folder: Path) -> None:
    given = [sys.executable, "-m", "compile_remat", "plan", f"models_that_fail:{name}", "--device", "l4"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("TORCH_LOGS", None)
    done = subprocess.run(given, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    loading, tracing, cause = done.stderr.splitlines()
    assert (loading, tracing) == ("loading torch", f"tracing models_that_fail:{name}")
    assert CASES[name].format(file="models_that_fail.py") in cause


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_package_at_all\n", "No module named 'no_such_package_at_all' (unimportable.py:1: import"),
        ("x = 1\ndef build(:\n", "SyntaxError: invalid syntax (unimportable.py:2: def build(:)"),
        ("raise SystemError('broken')\n", "SystemError: broken (unimportable.py:1: raise"),
    ],
)
def test_a_module_that_does_not_import_names_the_line(text: str, said: str, folder: Path) -> None:
    (folder / "unimportable.py").write_text(text)
    with pytest.raises(RematError, match="the module unimportable cannot be imported: ") as caught:
        Builder("unimportable:build").sizes()
    assert said in str(caught.value)
