"""The page about the path of one call names functions that run, in that order."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from tests.sources import ROOT

PAGE = ROOT / "docs/internals/one-call.md"


def steps() -> list[str]:
    """The functions of the list."""
    return re.findall(r"^\d+\. `([\w.]+)`: ", PAGE.read_text(), re.MULTILINE)


def code_of(name: str) -> CodeType:
    """The code of a function or method, by its whole name."""
    parts = name.split(".")
    module_parts = next(k for k, part in enumerate(parts) if part[0].isupper() or k == len(parts) - 1)
    found: Any = importlib.import_module(".".join(parts[:module_parts]))
    for part in parts[module_parts:]:
        found = getattr(found, part)
    code = inspect.unwrap(found).__code__
    assert isinstance(code, CodeType)
    return code


def test_functions_of_the_page_exist() -> None:
    assert len({code_of(name) for name in steps()}) == len(steps()) == 18


@pytest.mark.full
@pytest.mark.usefixtures("fresh", "own_caches")
def test_functions_of_the_page_run_in_its_order() -> None:
    wanted, called = {code_of(name): name for name in steps()}, list[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in wanted:
            called.append(wanted[frame.f_code])

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    step = torch.compile(model, backend="remat", options={"memory_budget": "min"})
    sys.setprofile(note)
    try:
        step(torch.randn(64, 8))
    finally:
        sys.setprofile(None)
    left = iter(called)
    assert [name for name in steps() if name not in left] == []
