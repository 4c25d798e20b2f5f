"""Running `tests.jobs.training`, or another job, in processes of its own, with their own environment, cache and hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import compile_remat

JOBS = Path(__file__).parent / "jobs"
INSTALLED = Path(compile_remat.__file__).resolve().parent.parent

Job = Mapping[str, Any]


def start(environ: Mapping[str, str], sources: Path = INSTALLED, script: str = "training") -> subprocess.Popen[str]:
    """A process that waits for jobs; no setting of the caller's reaches it, and `sources` holds the package it uses."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REMAT_", "TORCH", "RANK"))}
    return subprocess.Popen(
        [sys.executable, "-P", str(JOBS / f"{script}.py")],
        env={**kept, "PYTHONPATH": str(sources), **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Hand over the jobs, wait, and return what was seen of each."""
    printed, said = process.communicate(json.dumps(list(jobs)))
    assert process.returncode == 0, said[-4000:]
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def run(
    jobs: Sequence[Job], environ: Mapping[str, str], sources: Path = INSTALLED, script: str = "training"
) -> list[dict[str, Any]]:
    """The results of each job in one process."""
    return finish(start(environ, sources, script), jobs)
