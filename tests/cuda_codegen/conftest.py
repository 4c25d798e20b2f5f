"""Triton code without a GPU: each job runs in a process of its own, as the fake device must be there before torch is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

Job = Callable[..., list[dict[str, Any]]]


def obstacle() -> str:
    """The reason why the tests cannot run here; empty if they can."""
    if find_spec("triton") is None:
        return "the package triton is missing: make test-cuda-codegen"
    if shutil.which("g++") is None:
        return "g++ is missing"
    return "a real GPU is here" if torch.cuda.is_available() else ""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """``job(module, *arguments, **environ)`` runs a module and returns its lines of JSON; dicts are handed over as JSON."""
    if text := obstacle():
        pytest.skip(text)

    def run(module: str, *arguments: object, **environ: str) -> list[dict[str, Any]]:
        texts = [json.dumps(a) if isinstance(a, dict) else str(a) for a in arguments]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REMAT_", "TORCH"))}
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
        folders = [folder for folder in sys.path if folder]
        done = subprocess.run(
            [sys.executable, "-m", module, *texts],
            env={
                **kept,
                **caches,
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(folders),
                **environ,
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run
