"""The files that tests of names and of prose read; torch is not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ROOMS = ("compile_remat", "passes", "cost_models")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    """Returns the path from the root of the repository."""
    return str(path.relative_to(ROOT))


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yields docstrings of the module, its classes and functions, and the strings behind assignments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
