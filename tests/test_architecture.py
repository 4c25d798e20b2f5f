"""Rules that import contracts and the linter cannot check: honest module names, small rooms, imports through a room's face."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("compile_remat", "passes", "cost_models")
MOST_MODULES = 16
FACES = ("compile_remat.passes", "compile_remat.cost_models")
MODULES = sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))
ROOMS = sorted({path.parent for path in MODULES})


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_no_function_or_class_bears_its_modules_name(path: Path) -> None:
    """`from room import name` would give the module or the function, by which was imported first."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kinds)]
    assert path.stem not in names


@pytest.mark.parametrize("room", ROOMS, ids=_id)
def test_a_room_holds_few_modules_and_says_what_they_are(room: Path) -> None:
    modules = [path for path in room.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert len(modules) <= MOST_MODULES, f"which room is missing? {sorted(path.stem for path in modules)}"
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    assert docstring, f"{room}/__init__.py says neither what lives here nor what may not"


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[len(ROOT.parts)] == "compile_remat"], ids=_id)
def test_the_front_imports_passes_and_cost_models_from_their_faces(path: Path) -> None:
    deep = [
        name
        for name in _imported(ast.parse(path.read_text(encoding="utf-8")))
        if name.startswith(tuple(f"{face}." for face in FACES))
    ]
    assert not deep, "widen the face (its __init__) and import from there"
