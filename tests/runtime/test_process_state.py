"""All state that the process remembers is listed, and can be cleared."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import compile_remat
from compile_remat import config, report
from compile_remat.budget import MemoryBudget
from compile_remat.planning import budget_source, plain_peaks
from compile_remat.report import Report
from compile_remat.runtime import process_state
from compile_remat.runtime.process_state import clear_process_state
from compile_remat.runtime.shared_budget import budget_of

CONTAINERS = frozenset("dict list set OrderedDict Counter WeakKeyDictionary WeakValueDictionary WeakSet".split())
CELLS = frozenset("ContextVar local count cycle defaultdict deque".split())
"""Types of objects that hold state whatever they are made of."""


def holds_state(value: ast.expr) -> bool:
    """Returns whether an assigned value is made to be changed: an empty container, a context variable, a counter."""
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Subscript(value=called)) | ast.Call(func=called):
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            return name in CELLS or (name in CONTAINERS and not value.args and not value.keywords)
    return False


def state_of(text: str) -> set[str]:
    """The names of a module and of its classes that hold state, and those that its functions assign anew (``global``)."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    names = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    for body in (tree.body, *(node.body for node in nodes if isinstance(node, ast.ClassDef))):
        for line in body:
            if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None and holds_state(line.value):
                names |= {ast.unparse(target) for target in getattr(line, "targets", None) or [line.target]}  # type: ignore[union-attr]
    return names


@pytest.mark.parametrize(
    "line",
    [
        "x = {}",
        "x: dict[str, int] = dict[str, int]()",
        "x = weakref.WeakSet()",
        "x = collections.deque(maxlen=3)",
        "x = set[int]()",
        "x = ContextVar('x', default=None)",
        "x = itertools.count(1)",
        "class A:\n    x = []",
        "def f():\n    global x",
        "x = local()",
    ],
)
def test_state_is_found_in_any_spelling(line: str) -> None:
    assert state_of(line) == {"x"}


@pytest.mark.parametrize(
    "line", ["x = {1: 2}", "x = [1]", "x = dict(a=1)", "x = set('ab')", "def f():\n    x = []", "x: int"]
)
def test_tables_and_locals_are_no_state(line: str) -> None:
    assert state_of(line) == set()


def test_every_name_that_keeps_state_is_listed() -> None:
    folder = Path(compile_remat.__file__).parent
    files = [
        file
        for room in (folder, folder.parent / "passes", folder.parent / "cost_models")
        for file in room.rglob("*.py")
    ]
    found = {name for file in files for name in state_of(file.read_text())}
    assert {"_REPORTS", "_BUDGETS", "_LARGEST", "_STEP", "_WAITING", "_REGIONS"} <= found
    assert [name for name in sorted(found) if f".{name} " not in (process_state.__doc__ or "").replace(",", " ")] == []


def test_what_earlier_compilations_left_is_forgotten() -> None:
    before = budget_of(torch.device("cpu"), "1GiB", MemoryBudget("bytes", 1 << 30))
    report.record(Report("key", "1GiB", 1 << 30, None))
    plain_peaks.note_plain_bytes("cpu", 1 << 30)
    with pytest.warns(compile_remat.SettingWarning):
        budget_source.warn_ignored("1GiB", "a ratio")
    clear_process_state()
    assert compile_remat.reports() == [] and plain_peaks.largest_plain_bytes("cpu") == 0
    assert budget_of(torch.device("cpu"), "1GiB", MemoryBudget("bytes", 1 << 30)) is not before
    with pytest.warns(compile_remat.SettingWarning):
        budget_source.warn_ignored("1GiB", "a ratio")
    assert config.warn_unknown_variable.cache_info().currsize == 0
    clear_process_state()


def test_reports_alone_are_forgotten_by_reset_reports() -> None:
    before = budget_of(torch.device("cpu"), "2GiB", MemoryBudget("bytes", 2 << 30))
    report.record(Report("key", "2GiB", 2 << 30, None))
    compile_remat.reset_reports()
    assert compile_remat.reports() == []
    assert budget_of(torch.device("cpu"), "2GiB", MemoryBudget("bytes", 2 << 30)) is before
