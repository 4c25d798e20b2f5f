"""The version of torch that runs, and private names that other versions may lack.

Imports nothing of compile_remat, and nothing private.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch

SUPPORTED = ((2, 11), (2, 16))
"""Half-open range of torch versions that the pipeline was written for and its tests were run on."""


class MissingName:
    """Stands for a name that a torch outside the range lacks, so that modules of compile_remat can still be imported there."""


def torch_version() -> tuple[int, int]:
    """Major and minor version of the torch that runs; (0, 0) if its version text does not begin with two numbers."""
    numbers = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def is_supported() -> bool:
    """Returns whether this torch lies in the range; a development or release build of a version counts as that version."""
    return SUPPORTED[0] <= torch_version() < SUPPORTED[1]


def version_problem() -> str:
    """Returns one line that says why this torch is not supported, and how to get one that is; empty if it is supported."""
    if is_supported():
        return ""
    (first, low), (last, end) = SUPPORTED
    cure = f"upgrade compile-remat, or install torch {last}.{end - 1}"
    if torch_version() < SUPPORTED[0]:
        cure = f"install torch {first}.{low} or newer"
    return f"compile_remat supports torch {first}.{low} to {last}.{end - 1}, not {torch.__version__} ({cure})"


def private_module(name: str) -> Any:
    """Returns a private module of torch, or `MissingName` if a torch outside the range lacks the module.

    Raises:
        ImportError: A supported torch lacks it.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        if is_supported():
            raise
        return MissingName


def private_name(module: str, *names: str) -> Any:
    """Returns the first of `names` that a private module of torch has, or `MissingName` if a torch outside the range has none.

    A caller that compiles checks `version_problem` before any code uses the `MissingName`.

    Raises:
        ImportError: A supported torch lacks all of them.
    """
    found = private_module(module)
    for name in names:
        if hasattr(found, name):
            return getattr(found, name)
    if is_supported():
        raise ImportError(f"torch {torch.__version__} has no {' or '.join(names)} in {module}")
    return MissingName
