"""Finds the packages that lie beside `compile_remat` in a checkout, and inside of it in a wheel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

BESIDE = ("compile_remat.passes", "compile_remat.cost_models")


class PackagesBeside:
    """A finder of these packages alone; with the checkout's root in `__path__`, all folders there would be parts of the package.

    A walk over the package, as torch's `TORCH_LOGS` makes, would then find the package in itself without an end.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of one of these packages; None for any other module."""
        return PathFinder.find_spec(fullname, [str(self.root)], target) if fullname in BESIDE else None


def find_packages_beside(package: Path) -> None:
    """Make these packages importable if the folder of the package `compile_remat` lies in a checkout; else do nothing."""
    root = package.parent
    if (root / "pyproject.toml").is_file():
        sys.meta_path.append(PackagesBeside(root))
