"""Names in README, manual and docstrings exist: modules, files, commands, options; generated parts are up to date."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import compile_remat
from benchmarks.pages import blocks
from compile_remat import cli
from compile_remat._torch.codegen_rules import inductor_rules
from compile_remat.runtime.states import CALL_TABLE, PLAN_TABLE
from tests.sources import BENCHMARKS, PAGES, ROOMS, ROOT, SOURCES, TESTS, docstrings, name_of

FILE = re.compile(r"(?<![\w./-])(?:compile_remat|passes|cost_models|benchmarks|docs|examples|tests)/[\w./-]*\w")
DOTTED = re.compile(r"\bcompile_remat(?:\.[A-Za-z_]\w*)+")
BENCHMARK = re.compile(r"python -m (benchmarks\.\w+)([^`\n]*)")
COMMAND = re.compile(r"compile-remat ([a-z]+)([^`\n]*)")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s:]+)\)")


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


# -- pages ------------------------------------------------------------------------------------------------------------


@pages
def test_named_modules_and_attributes_exist(page: Path) -> None:
    assert [dotted for dotted in DOTTED.findall(page.read_text()) if not exists(dotted)] == []


def test_named_files_exist() -> None:
    """In docstrings and comments, too."""
    for path in (*PAGES, *SOURCES, *BENCHMARKS):
        missing = [file for file in FILE.findall(path.read_text()) if not (ROOT / file).exists()]
        assert missing == [], name_of(path)


@pages
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings], target


def test_named_benchmarks_take_the_options_that_they_are_given() -> None:
    """In docstrings and comments, too."""
    for path in (*PAGES, *SOURCES, *BENCHMARKS):
        for module, arguments in BENCHMARK.findall(path.read_text()):
            place = ROOT / module.replace(".", "/")
            file = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
            assert file.exists(), f"{name_of(path)}: {module}"
            known = file.read_text() + (ROOT / "benchmarks/common/harness.py").read_text()
            for option in set(re.findall(r"--[a-z][a-z-]*", arguments)) - {"--help"}:
                assert f'"{option}"' in known, f"{name_of(path)}: {module} {option}"


@pages
def test_named_commands_take_the_options_that_they_are_given(page: Path) -> None:
    commands = {command.name: command for command in cli.COMMANDS}
    for name, arguments in COMMAND.findall(page.read_text()):
        assert name in commands, name
        known = options_of(commands[name])
        assert [o for o in re.findall(r"--[a-z][a-z-]*", arguments.partition("#")[0]) if o not in known] == []


def options_of(command: cli.Command) -> set[str]:
    parser = argparse.ArgumentParser()
    add_arguments = getattr(importlib.import_module(command.module), command.arguments, None)
    if add_arguments is not None:
        add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


@pages
def test_named_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in re.findall(r"(?:^    |`)make ((?:[a-z-]+(?: |$|`))+)", page.read_text(), re.MULTILINE):
        assert set(line.strip("` ").split()) <= targets, line


@pages
def test_code_compiles_and_imports_names_that_exist(page: Path) -> None:
    for block in BLOCK.findall(page.read_text()):
        for node in ast.walk(ast.parse(dedent(without_title(block)))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("compile_remat"):
                assert [alias.name for alias in node.names if not exists(f"{node.module}.{alias.name}")] == []


@pages
def test_code_with_the_name_of_a_file_stands_in_that_file(page: Path) -> None:
    for block in BLOCK.findall(page.read_text()):
        first = block.partition("\n")[0]
        if first.startswith("# ") and first.endswith(".py"):
            assert without_title(block) in (ROOT / first.removeprefix("# ")).read_text(), first


def without_title(block: str) -> str:
    first, _, rest = block.partition("\n")
    return rest if first.startswith("# ") and first.endswith(".py") else block


@pages
def test_pages_are_ascii(page: Path) -> None:
    assert page.read_text().isascii()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(re.findall(r": ([\w/-]+\.md)", navigation)) == sorted(pages)


# -- generated parts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", blocks.PAGES, ids=lambda page: page.name)
def test_tables_of_results_are_what_the_generator_writes(page: Path) -> None:
    """To write them: python -m benchmarks --markdown."""
    assert page.read_text() == blocks.filled(page.read_text())


def test_every_stored_result_is_on_a_page() -> None:
    assert blocks.unshown() == set()
    with pytest.raises(ValueError, match="no result and no table is called"):
        blocks.filled("<!-- nothing.json: begin -->\n<!-- nothing.json: end -->")


def test_the_page_of_results_is_short() -> None:
    assert len((ROOT / "docs/results.md").read_text().split()) <= 6000


def test_settings_are_all_described_with_their_defaults() -> None:
    table = re.findall(
        r"^\| `(\w+)` \| .* \| (.*) \|$", (ROOT / "docs/reference/settings.md").read_text(), re.MULTILINE
    )
    config = compile_remat.RematConfig()
    names = [field.name for field in dataclasses.fields(config)]
    assert [name for name, _ in table] == names, (
        "docs/reference/settings.md has a row for each setting, in the order of config.py"
    )
    absent = {"capacity": "the GPU's own", "instances": "`learn`", "time_limit": "by the graph's size"}
    for name, default in table:
        value = getattr(config, name)
        assert default == (
            absent.get(name, "none") if value is None else f"`{int(value) if value is False else value}`"
        ), name


FALSE_OF_RULES = {"always_concatenates": "only of buffers", "has_channels_last": "by the graph's convolutions"}
"""The table's word for a rule that does not hold; for rules not listed here, "no"."""


def test_rules_of_inductor_are_those_of_the_installed_one() -> None:
    """Of the two columns for a CPU, one holds, on several threads; that for a GPU does on every version."""
    page = between((ROOT / "docs/internals/memory-model.md").read_text(), "rules")
    table = {
        row[0]: row[1:] for row in re.findall(r"^\| `(\w+)`[^|]*\| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    }
    with torch._inductor.config.patch({"cpp.threads": 2}):
        cpu, gpu = inductor_rules("cpu"), inductor_rules("cuda")
    is_old = cpu.max_reads == gpu.max_reads
    for name, (before, since, triton) in table.items():
        on_cpu = before if is_old else since
        assert text_of_rule(name, getattr(cpu, name)) == on_cpu, name
        assert text_of_rule(name, getattr(gpu, name)) == (on_cpu if triton == "as the CPU" else triton), name


def text_of_rule(name: str, value: int | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else FALSE_OF_RULES.get(name, "no")
    return str(value)


@pytest.mark.parametrize("table", [PLAN_TABLE, CALL_TABLE], ids=["plan", "call"])
def test_states_of_a_region_are_those_of_the_code(table: str) -> None:
    assert dedent(table).strip("\n") in (ROOT / "docs/internals/regions.md").read_text()


@pytest.mark.proof
def test_error_of_the_readme_is_what_the_code_raises() -> None:
    from torch.nn.functional import gelu

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(gelu(self.up(self.norm(x))))

    model = nn.Sequential(*[Block() for _ in range(3)])
    with pytest.raises(compile_remat.BudgetError) as caught:
        compile_remat.plan(model, torch.randn(8, 256, 256), memory_budget="8MiB", device="cpu")
    text = f"{type(caught.value).__name__}: {caught.value}"
    (shown,) = re.findall(
        r"^```text\n(BudgetError.*?)\n```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    place = r"\([^()]*\.py:\d+\)"
    assert re.sub(place, "(here)", text) == re.sub(place, "(here)", shown)


def between(text: str, name: str) -> str:
    return text.partition(f"<!-- {name}: begin -->\n")[2].partition(f"\n<!-- {name}: end -->")[0]


# -- docstrings -------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_docstrings_name_what_exists() -> None:
    """In single backquotes stand names of ours: dotted ones lead somewhere, ones with an underscore occur in code."""
    unknown: dict[str, list[str]] = {}
    for path in SOURCES:
        for text in docstrings(ast.parse(path.read_text())):
            for quoted in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)", text):
                is_simple = "." not in quoted and "_" not in quoted.strip("_")
                is_known = quoted in words_in_code() if "." not in quoted else leads_somewhere(quoted, path)
                if not (is_simple or is_known):
                    unknown.setdefault(name_of(path), []).append(quoted)
    assert unknown == {}


@cache
def words_in_code() -> frozenset[str]:
    """Identifiers and words of texts, docstrings apart, in our sources and tests; names of their modules."""
    found: set[str] = set()
    for path in [*SOURCES, *BENCHMARKS, *TESTS]:
        tree = ast.parse(path.read_text())
        told = set(docstrings(tree))
        found.add(path.stem)
        for node in ast.walk(tree):
            for _, value in ast.iter_fields(node):
                if isinstance(value, str) and value not in told:
                    found.update(re.findall(r"\w+", value))
    return frozenset(found)


def imported(path: Path) -> ModuleType:
    """Returns a module of ours; an empty one if it needs a library that is not installed."""
    try:
        return importlib.import_module(module_name(path))
    except compile_remat.MissingExtraError:
        return ModuleType(path.stem)


def leads_somewhere(dotted: str, path: Path) -> bool:
    """True if a dotted name is a file, or can be followed from a module or class of ours, or from an installed package."""
    first, _, rest = dotted.partition(".")
    if rest in ("py", "json", "md", "toml", "txt"):
        return any((ROOT / room).rglob(dotted) for room in (*ROOMS, "tests", "benchmarks"))
    if exists(dotted) or exists(f"compile_remat.{dotted}"):
        return True
    module = imported(path)
    if re.search(rf"\b{first}: ", path.read_text()) and rest in words_in_code():
        return True  # an argument or a field, and what is read of it
    starts = [vars(module)[first]] if hasattr(module, first) else []
    starts += [imported(p) for p in SOURCES if first in (p.stem, p.parent.name)]
    starts += [getattr(imported(p), first) for p in classes().get(first, ())]
    return any(follows(start, rest.split(".")) for start in starts) or rest.split(".")[-1] in instance_attributes()


@cache
def classes() -> dict[str, list[Path]]:
    """Paths of the files that define each class of our sources, by the class's name."""
    found: dict[str, list[Path]] = {}
    for path in SOURCES:
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(path)
    return found


@cache
def instance_attributes() -> frozenset[str]:
    """Names assigned to `self` somewhere: attributes that a class lacks until it is called."""
    found = set()
    for path in SOURCES:
        found.update(re.findall(r"\bself\.(\w+)(?:, self\.\w+)*\s*(?::[^=]*)?=[^=]", path.read_text()))
    return frozenset(found)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "compile_remat" else ("compile_remat", *parts))
    return name.removesuffix(".__init__")


def exists(dotted: str) -> bool:
    """True if a dotted name is a module, or an attribute of a module or of a class in it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            is_module = importlib.util.find_spec(name) is not None
        except (ModuleNotFoundError, ValueError, compile_remat.MissingExtraError):
            is_module = False
        if is_module:
            try:
                module = importlib.import_module(name)
            except compile_remat.MissingExtraError:  # the names that such a module defines are in its text
                tree = ast.parse(Path(importlib.util.find_spec(name).origin).read_text())
                defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
                return not parts[length:] or (parts[length] in defined and len(parts) == length + 1)
            return follows(module, parts[length:])
    return False


def follows(found: Any, names: list[str]) -> bool:
    """True if the attributes can be looked up one after the other; fields of dataclasses count without a default."""
    for place, name in enumerate(names):
        if hasattr(found, name):
            found = getattr(found, name)
        else:
            return place == len(names) - 1 and inspect.isclass(found) and name in inspect.get_annotations(found)
    return True
