"""The reference of the manual: every public name, command, field of a file, message and glossary entry is where it should be."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import compile_remat
from compile_remat import cli, errors
from compile_remat.forecast.baselines import Baseline
from compile_remat.forecast.device_choice import DeviceRow
from compile_remat.forecast.forecasting import Forecast
from compile_remat.forecast.max_batch import MaxBatch
from compile_remat.passes import Plan, Status

DOCS = Path(__file__).resolve().parent.parent / "docs"
REFERENCE = DOCS / "reference"
SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)


def shown(page: str) -> list[Any]:
    """The objects whose docstrings a page shows, by their paths."""
    return [
        getattr(importlib.import_module(module_of(path)), path.rpartition(".")[2])
        for path in SHOWN.findall((REFERENCE / page).read_text())
    ]


def module_of(path: str) -> str:
    module = path.rpartition(".")[0]
    return module if module.startswith("compile_remat") else f"compile_remat.{module}"


def test_the_api_shows_every_public_name() -> None:
    public = {name: getattr(compile_remat, name) for name in compile_remat.__all__}
    assert {found.__name__: found for found in shown("api.md")} == public


@cache
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("command_help", DOCS / "command_help.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_page_of_the_command_line_has_the_help_of_every_command() -> None:
    page = hook().on_page_markdown((REFERENCE / "cli.md").read_text())
    for command in cli.COMMANDS:
        _, _, text = page.partition(f"\n## {command.name}\n")
        section, _, _ = text.partition("\n## ")
        for action in hook().parser_of(command)._actions:
            assert all(option in section for option in action.option_strings), action.option_strings
        assert re.search(rf"^    compile-remat {command.name} +# ", page, re.MULTILINE), (
            "not in the list above the help"
        )


def test_fields_of_files_are_all_described() -> None:
    """In the docstrings that the page shows, which name no field that is not there."""
    for kind in shown("json.md"):
        _, _, told = (inspect.getdoc(kind) or "").partition("Attributes:\n")
        described = [name for line in re.findall(r"^    ([\w, ]+):", told, re.MULTILINE) for name in line.split(", ")]
        assert set(described) | {"pictures"} == {field.name for field in dataclasses.fields(kind)} | {"pictures"}, kind


def keys(name: str) -> set[str]:
    page = (REFERENCE / "json.md").read_text()
    _, _, text = page.partition(f"<!-- keys of a {name}: begin -->\n")
    return set(re.findall(r"^- `(\w+)`:", text.partition(f"<!-- keys of a {name}: end -->")[0], re.MULTILINE))


PLAN = Plan("key", Status.FEASIBLE, 1, (), (), 1, 1, 0, 1, 0, 0, 0)


def check_keys(name: str, written: str, fields: set[str]) -> None:
    """Check that each key of a JSON text is a field or has a line on the page."""
    found = json.loads(written).keys()
    places = f'"keys of a {name}" in docs/reference/json.md, and KEYS in tests/cli/write_schemas.py'
    assert found - fields - keys(name) == set(), f"add it to {places}"
    assert keys(name) - found == set(), f"no output has it: take it out of {places}"
    assert fields - found == set(), "a field of the dataclass that to_json leaves out"


def test_a_key_without_a_line_names_the_page() -> None:
    with pytest.raises(AssertionError, match=r'add it to "keys of a plan" in docs/reference/json.md') as caught:
        check_keys("plan", '{"status": "FEASIBLE", "schema": 1, "new": 2}', set())
    assert "'new'" in str(caught.value)
    with pytest.raises(AssertionError, match="take it out of"):
        check_keys("plan", '{"status": "FEASIBLE"}', set())


def test_keys_of_files_are_those_of_the_fields_and_of_the_lists() -> None:
    check_keys("plan", PLAN.to_json(), {field.name for field in dataclasses.fields(Plan)} - {"pictures"})
    report = compile_remat.Report("key", "min", None, PLAN)
    assert json.loads(report.to_json()).keys() == {field.name for field in dataclasses.fields(report)}
    sizes = {"batch": 1}
    found = Forecast("m", sizes, "l4", "bf16", "sgd", 1, 1, 0, 1, None, PLAN, 1, largest_batch=MaxBatch(1, PLAN, 1))
    compared = dataclasses.replace(found, compared=(Baseline("none", 1, 1, PLAN),))
    check_keys("forecast", compared.to_json(), {field.name for field in dataclasses.fields(found)})
    check_keys("row", json.dumps(DeviceRow("l4", None, 1, PLAN, None).to_json_data()), set())
    moment = compile_remat.StepMoment("forward", "", 1, 0)
    rank = compile_remat.RankForecast(
        "m", "l4", "dp=2", "ddp", 2, "bf16", "sgd", sizes, 1, 1, 0, 1, 0, 0, 1, moment, 1, None, None,
        (compile_remat.RankGraph("", 1, PLAN),), 1, None, 1, 0,
    )  # fmt: skip
    check_keys("rank", rank.to_json(), {field.name for field in dataclasses.fields(rank)})


def test_every_error_and_warning_has_its_entry() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]
    public = {kind.__name__ for kind in kinds if kind.__module__ == errors.__name__}
    assert public <= set(compile_remat.__all__)
    headings = re.findall(r"^### `(\w+)`$", (REFERENCE / "messages.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(public)


def test_texts_of_warnings_that_are_explained_are_in_the_code() -> None:
    """Between quotes in the first column of the warnings' table; "..." stands for anything."""
    rows = re.findall(r'^\| (".*") \| ', (REFERENCE / "messages.md").read_text(), re.MULTILINE)
    quoted = [text.strip(" ;,") for row in rows for text in re.findall(r'"([^"]+)"', row)]
    pieces = [piece.strip(" ;,") for text in quoted for piece in text.split("...") if piece.strip(" ;,")]
    assert len(pieces) >= 10
    assert [piece for piece in pieces if piece not in words_of_code()] == []


@cache
def words_of_code() -> str:
    """Our sources with texts that go over several lines joined."""
    sources = "\n".join(path.read_text() for path in Path(compile_remat.__path__[0]).rglob("*.py"))
    return re.sub(r'["\']\n\s*f?["\']', "", sources)


def test_every_status_has_its_entry() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| ", (REFERENCE / "messages.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted([*Status.__members__, "NOT_PLANNED", "NOT_MODELLED"])


def test_the_glossary_is_short() -> None:
    words = re.findall(r"^\| ([^|]+) \| ", (REFERENCE / "glossary.md").read_text(), re.MULTILINE)
    assert len(words) - words.count("word") <= 60


@pytest.mark.parametrize(
    "words", ["activation checkpointing", "batch size", "gradient accumulation", "LoRA", "out of memory"]
)
def test_a_heading_has_the_words_that_people_search_for(words: str) -> None:
    """In a heading, as the search of the manual puts these first."""
    headings = [h for page in DOCS.rglob("*.md") for h in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)]
    assert [h for h in headings if words.lower() in h.lower().replace("-", " ")]


RUN = (
    "getting-started.md",
    *(
        f"guides/{name}.md"
        for name in ("gradient-accumulation", "evaluation", "resuming", "early-gradients", "several-graphs", "own-loop")
    ),
)
"""Pages whose blocks are a program, one after the other; a block that begins with the path of a script is a part of that one."""


@pytest.mark.full
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for block in blocks if not block.startswith("# examples/")]
    assert blocks
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert "Error" not in capsys.readouterr().out
    if page.endswith("own-loop.md"):
        said = re.findall(r"# (\d+) (\d+)$", blocks[-1], re.MULTILINE)
        assert said == [(str(names["measured"].peak_bytes), str(compile_remat.reports()[-1].predicted_peak_bytes))]
    if page.endswith("accumulation.md"):
        train = names["train"]
        assert train(2) - train(1) == sum(parameter.nbytes for parameter in names["model"].parameters())


@pytest.mark.parametrize("page", [*DOCS.rglob("*.md")], ids=lambda page: page.name)
def test_a_part_of_a_script_is_as_in_the_script(page: Path) -> None:
    for script, part in re.findall(
        r"^```python\n# (examples/\S+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        assert part in (DOCS.parent / script).read_text()


FUNCTIONS = [name for name in compile_remat.__all__ if inspect.isfunction(getattr(compile_remat, name))]


@pytest.mark.parametrize("name", [*sorted({*FUNCTIONS} - {"uninstall", "reset_reports"}), "RematConfig"])
def test_public_functions_have_an_example_with_its_result(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(compile_remat, name), name)
    assert [example for example in test.examples if example.want]


@pytest.mark.full
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("name", [*FUNCTIONS, "RematConfig"])
def test_examples_of_docstrings_are_true(name: str) -> None:
    names = {"compile_remat": compile_remat, "torch": torch}
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(verbose=False, optionflags=options)
    said: list[str] = []
    for test in doctest.DocTestFinder(recurse=False).find(getattr(compile_remat, name), name, globs=names):
        runner.run(test, out=said.append)
    assert said == []
