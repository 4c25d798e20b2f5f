"""The libraries that people train with: tests of a library that is not installed are skipped, and say how to get it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import compile_remat
from benchmarks.common.torchvision_operators import declare_missing_operators

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "stacks"

declare_missing_operators()
if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))  # a script finds its neighbours, as when it is run


@pytest.fixture(autouse=True)
def fresh(own_caches: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is compiled or installed, and what libraries write lies in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    yield
    compile_remat.uninstall()
