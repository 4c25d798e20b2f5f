"""Rules that import contracts and the linter cannot check: honest module names, small rooms, imports through a room's face."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("compile_remat", "passes", "cost_models")
MOST_MODULES = 16
DEEP = ("compile_remat.passes.", "compile_remat.cost_models.")
MODULES = sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))
ROOMS = sorted({path.parent for path in MODULES})


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


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
def test_the_front_imports_what_a_face_exports_from_the_face(path: Path) -> None:
    """Other names of `passes` come from their rooms: the face is for users; all of `cost_models` comes from its face."""
    exported = _exported(ROOT / "passes/__init__.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        module = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
        assert not any(name.startswith(DEEP) for name in names if isinstance(node, ast.Import)), (
            f"{names}: from ... import"
        )
        assert not module.startswith("compile_remat.cost_models."), f"{module}: widen the face and import from there"
        if module.startswith("compile_remat.passes."):
            assert not names & exported, f"{names & exported}: import them from compile_remat.passes"


def test_the_face_of_passes_is_small() -> None:
    """Problems, plans, facts, the planner, and the functions that make and take them: as many names as one reads."""
    assert len(_exported(ROOT / "passes/__init__.py")) <= 35


def _exported(face: Path) -> set[str]:
    (names,) = (node.value for node in ast.parse(face.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign))
    return set(ast.literal_eval(names))
