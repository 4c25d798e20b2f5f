"""Warnings point at a line of the user's program, and come once for one text; all of ours are given in one place."""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat._util.user_warnings import (
    NOWHERE,
    drop_held,
    forget_warnings,
    held_warnings,
    note_compilation,
    place_of_user,
    printed_warnings,
    warn_user,
)
from compile_remat.errors import SettingWarning, warn
from tests.sources import ROOT, SOURCES, name_of


def given(act: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        act()
    return [each for each in seen if issubclass(each.category, (compile_remat.PlannerWarning, SettingWarning))]


def line_of(found: warnings.WarningMessage) -> str:
    return Path(found.filename).read_text().splitlines()[found.lineno - 1].strip()


def test_only_one_module_gives_and_holds_warnings() -> None:
    """The others would point at a line of ours, or be repeated wherever torch resets Python's record of warnings."""
    names = {name_of(path) for path in SOURCES if "warnings" in _imports(path)}
    assert names == {"compile_remat/_util/user_warnings.py"}


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_the_place_is_outside_of_ours_of_torch_and_of_the_library() -> None:
    globals_of: dict[str, Any] = {"call": lambda: torch.utils._pytree.tree_map(lambda _: place_of_user(), [0])}
    exec("def f():\n    return call()", {**globals_of, "__name__": "compile_remat.planning"}, globals_of)
    (place,) = globals_of["f"]()
    assert (place.filename, place.module) == (__file__, __name__)


def test_one_text_comes_once_also_where_python_forgets_its_record() -> None:
    seen = given(lambda: [(warnings.resetwarnings(), warnings.simplefilter("always"), warn("a fact")) for _ in "ab"])
    assert [str(each.message) for each in seen] == ["compile_remat: a fact"]
    assert len(given(lambda: (warn("a fact"), warn("a fact", SettingWarning), warn("another")))) == 2
    forget_warnings()
    assert len(given(lambda: warn("a fact"))) == 1


def test_a_warning_that_is_an_error_is_raised_each_time() -> None:
    for _ in range(2):
        with warnings.catch_warnings(), pytest.raises(compile_remat.PlannerWarning, match="a fact"):
            warnings.simplefilter("error")
            warn("a fact")


def test_held_warnings_are_given_only_if_somebody_gives_them() -> None:
    with held_warnings() as held:
        assert not given(lambda: warn("a fact"))
    assert held == [("compile_remat: a fact", compile_remat.PlannerWarning)]
    (found,) = given(lambda: warn_user(*held[0]))
    assert found.filename == __file__


def test_a_command_prints_each_text_once_at_its_end_but_those_that_a_note_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ZeroDivisionError), printed_warnings():
        assert not given(lambda: [warn(text) for text in ("a fact", "another", "another", "the last")])
        drop_held("a fact; the last")
        assert capsys.readouterr() == ("", "")
        raise ZeroDivisionError
    assert capsys.readouterr() == ("", "warning: another\n")


def test_a_thread_without_a_line_of_the_user_points_at_the_last_compilation() -> None:
    def in_thread() -> None:
        thread = threading.Thread(target=warn, args=["a fact"])
        thread.start()
        thread.join()

    (found,) = given(in_thread)
    assert (found.filename, found.lineno) == (NOWHERE.filename, NOWHERE.line)
    forget_warnings()
    note_compilation()  # here
    (found,) = given(in_thread)
    assert line_of(found) == "note_compilation()  # here"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_training_step_warns_once_at_the_users_line(fresh: None, check: str) -> None:
    options = {"memory_budget": 0.01, "compiler": "eager", "check": check}
    step = torch.compile(nn.Sequential(Wide(), Wide()), backend="remat", options=options)
    seen = given(lambda: step(torch.randn(64, 8)).sum().backward())
    assert ["less than the lowest reachable peak" in str(each.message) for each in seen] == [True, False]
    assert {line_of(each) for each in seen} == {"seen = given(lambda: step(torch.randn(64, 8)).sum().backward())"}


def test_explain_warns_once_at_the_users_line(fresh: None) -> None:
    seen = given(lambda: compile_remat.explain(Wide(), torch.randn(64, 8), memory_budget=0.01, compiler="eager"))
    assert len(seen) == 1 and line_of(seen[0]).startswith("seen = given(lambda: compile_remat.explain(")
    assert not seen[0].filename.startswith(str(ROOT / "compile_remat"))
