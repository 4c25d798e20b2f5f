"""`options()` has every setting with its type and a line; torch.compile takes its dict, and a RematConfig."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat import ConfigError, RematConfig, options
from tests.sources import ROOT

SETTINGS = dataclasses.fields(RematConfig)


# -- the function -----------------------------------------------------------------------------------------------------


def test_every_setting_is_an_argument_with_a_type_and_a_line() -> None:
    parameters = inspect.signature(options).parameters
    where = "compile_remat/typed_options.py has each setting of config.py, in its order"
    assert list(parameters) == [row.name for row in SETTINGS], f"{where}, as an argument of options()"
    assert {(p.kind, p.default) for p in parameters.values()} == {(inspect.Parameter.KEYWORD_ONLY, None)}
    hints = get_type_hints(options)
    assert all(hints[name] not in (object, Any) and type(None) in get_args(hints[name]) for name in parameters)
    told = (inspect.getdoc(options) or "").partition("Args:\n")[2].partition("\n\n")[0]
    described = re.findall(r"^    (\w+): [A-Z\"]", told, re.MULTILINE)
    assert described == list(parameters), f"{where}, in the docstring of options()"


def test_the_class_describes_every_setting() -> None:
    told = (inspect.getdoc(RematConfig) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    described = re.findall(r"^    (\w+): ", told, re.MULTILINE)
    assert described == [row.name for row in SETTINGS], "a line for each in the docstring of RematConfig, in config.py"


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_words_in_the_types_are_words_that_the_setting_takes(row: Any) -> None:
    """A default that is a word, and nothing that the parser refuses."""
    hints = get_args(get_type_hints(options)[row.name])
    words = [word for hint in hints if get_origin(hint) is Literal for word in get_args(hint)]
    for word in words:
        assert options(**{row.name: word}) == {row.name: word}
    if isinstance(row.default, str):
        assert row.default in words


def test_the_dict_has_what_was_given_as_it_was_given() -> None:
    assert options() == {}
    assert options(memory_budget=0.5, check=False, capacity=None) == {"memory_budget": 0.5, "check": False}
    assert options() is not options(), "torch takes keys out of the dict that it is given"


def test_a_bad_value_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ConfigError, match=r"memory_budget = 20 \(from an argument of options\).*write \"20MiB\""):
        options(memory_budget=20)


@pytest.mark.usefixtures("fresh")
def test_a_mistyped_name_has_the_same_suggestion_wherever_settings_are_named() -> None:
    wrong: dict[str, Any] = {"memory_bugdet": 0.5}
    said = (
        r"^'memory_bugdet' is not an option of the backend remat\. Allowed: .*log\. Did you mean \"memory_budget\"\?$"
    )
    for function in (options, RematConfig):
        with pytest.raises(ConfigError, match=said):
            function(**wrong)
    with pytest.raises(ConfigError, match=said.replace("log", "log, or any option of Inductor").removesuffix(r"\?$")):
        trained(wrong)
    with pytest.raises(TypeError, match="positional"):
        options(0.5)  # type: ignore[call-arg]
    assert list(inspect.signature(RematConfig).parameters) == [row.name for row in SETTINGS], "an editor shows them"


# -- a RematConfig as options -----------------------------------------------------------------------------------------


def trained(given: Any, backend: Any = "remat") -> compile_remat.Report:
    """Train one step; returns the report of its graph."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    torch.compile(model, backend=backend, options=given)(torch.randn(64, 8)).sum().backward()
    return compile_remat.reports()[-1]


@pytest.mark.usefixtures("fresh")
def test_torch_compile_takes_a_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A field at its default leaves the environment variable in force, a field that differs beats it."""
    monkeypatch.setenv("REMAT_MEMORY_BUDGET", "max")
    monkeypatch.setenv("REMAT_REPORT_DIR", str(tmp_path))
    report = trained(RematConfig(memory_budget="min", compiler="eager"))  # type: ignore[arg-type]
    assert report.budget == "min"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("fresh")
def test_a_model_compiled_in_place_takes_the_dict() -> None:
    """Of a class of our own: Dynamo traces no call of a module of torch's by itself."""

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    model = Net(8, 8)
    model.compile(backend="remat", options=options(memory_budget="min", compiler="eager") | {"max_autotune": False})
    model(torch.randn(64, 8)).sum().backward()
    assert compile_remat.reports()[-1].budget == "min"


def test_a_config_as_options_gives_the_same_config() -> None:
    assert RematConfig().as_options() == {}
    config = RematConfig(memory_budget="auto", slices=4, joint_passes=(print,), log="info")  # type: ignore[arg-type]
    assert sorted(config.as_options()) == ["joint_passes", "log", "memory_budget", "slices"]
    again = RematConfig.resolve(config.as_options(), {})
    assert again == config and again.memory_budget.is_given


# -- type checkers ----------------------------------------------------------------------------------------------------

RIGHT = """
import torch
from compile_remat import RematConfig, explain, options

model = torch.nn.Linear(2, 2)
torch.compile(model, backend="remat", options=options(memory_budget=0.5, slices="auto", time_limit=3))
model.compile(backend="remat", options=options(memory_budget="20GiB") | {"max_autotune": True})
explain(model, torch.ones(2), **options(memory_budget=0.5))
"""
WRONG = (
    "options(memory_bugdet=0.5)", 'options(gradients="erly")', "options(memory_budget=[1])", 'options(check="yes")',
    "RematConfig(memory_bugdet=0.5)", "RematConfig(check=[1])",
)  # fmt: skip
CHECKERS = {"mypy": [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"], "pyright": ["pyright"]}


@pytest.mark.full
@pytest.mark.parametrize("checker", CHECKERS)
def test_checkers_take_the_right_and_refuse_the_wrong(checker: str, tmp_path: Path) -> None:
    if checker == "mypy":
        pytest.importorskip("mypy")
    elif shutil.which(checker) is None:
        pytest.skip(f"{checker} is not here")
    package = tmp_path / "compile_remat"  # links, in the places that a wheel has
    package.mkdir()
    for path in [*(ROOT / "compile_remat").iterdir(), ROOT / "passes", ROOT / "cost_models"]:
        (package / path.name).symlink_to(path)
    program = RIGHT + "".join(f"{wrong}\n" for wrong in WRONG)
    (tmp_path / "program.py").write_text(program)
    last = RIGHT.count("\n")
    python = ["--pythonpath", sys.executable] if checker == "pyright" else [f"--cache-dir={tmp_path / 'cache'}"]
    done = subprocess.run(
        [*CHECKERS[checker], *python, "program.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    refused = {int(line) for line in re.findall(r"program\.py:(\d+):.*error", done.stdout)}
    assert refused == set(range(last + 1, last + 1 + len(WRONG))), done.stdout + done.stderr
