"""A walk over the package, as `TORCH_LOGS` makes one inside of `import torch`, ends, is short, and imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

WALK = """
import pkgutil, sys
sys.modules["torch"] = None
import compile_remat, compile_remat.passes, compile_remat.cost_models
def failed(name): raise
for package in (compile_remat, compile_remat.passes, compile_remat.cost_models):
    print(*(found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".", failed)))
"""

IMPORT = "import torch, resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)"

WORKER = """
import resource, torch
from torch._inductor.compile_worker.subproc_pool import SubprocPool
pool = SubprocPool(1)
assert pool.submit(len, "four").result(timeout=100) == 4
pool.shutdown()
print(sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""

LOGS = """
import logging, torch
from compile_remat._util.log_output import show_from
{configure}
log = logging.getLogger("compile_remat")
log.debug("a detail")
log.info("a message")
"""


@pytest.fixture(params=["checkout", "wheel"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder from which the package is imported: this checkout, or links in the places that a wheel has."""
    if request.param == "checkout":
        return ROOT
    package = tmp_path / "compile_remat"
    package.mkdir()
    for path in (*(ROOT / "compile_remat").iterdir(), ROOT / "passes", ROOT / "cost_models"):
        (package / path.name).symlink_to(path)
    return tmp_path


def _run(program: str, layout: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REMAT_", "TORCH_"))}
    environ = {**kept, "PYTHONPATH": str(layout), "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=100)


def test_a_walk_over_the_package_ends_and_imports_no_torch(layout: Path) -> None:
    inside, passes, cost_models = (line.split() for line in _run(WALK, layout).stdout.splitlines())
    tops = {name.split(".")[1] for name in inside}
    assert {"api", "cli", "planning"} <= tops
    assert tops.isdisjoint({"compile_remat", "tests", "benchmarks", "docs", "examples"})
    assert "compile_remat.passes.search.solver" in passes
    assert "compile_remat.cost_models.device.table" in cost_models
    assert ("passes" in tops) == (layout != ROOT)


def test_torch_logs_does_not_hang_a_checkout() -> None:
    _run(IMPORT, ROOT, TORCH_LOGS="+compile_remat")


@pytest.mark.full
@pytest.mark.parametrize("program", [IMPORT, WORKER], ids=["import torch", "a compile worker"])
def test_torch_logs_costs_at_most_two_seconds(program: str, layout: Path) -> None:
    plain_s = float(_run(program, layout).stdout.splitlines()[-1])
    logging_s = float(_run(program, layout, TORCH_LOGS="+compile_remat").stdout.splitlines()[-1])
    assert logging_s - plain_s <= 2


SHOW = "show_from('info')"
SET_LOGS = "torch._logging.set_logs(modules={'compile_remat': 10})"


@pytest.mark.parametrize(
    ("torch_logs", "configure", "seen"),
    [
        ("+compile_remat", "", ["a detail", "a message"]),
        ("+compile_remat", SHOW, ["a message"]),
        ("", f"{SHOW}; {SET_LOGS}", ["a detail", "a message"]),
    ],
    ids=["TORCH_LOGS alone", "REMAT_LOG has the level", "set_logs later"],
)
def test_torch_logs_shows_each_message_once(torch_logs: str, configure: str, seen: list[str]) -> None:
    environ = {"TORCH_LOGS": torch_logs} if torch_logs else {}
    said = _run(LOGS.format(configure=configure), ROOT, **environ).stderr.splitlines()
    assert [line.partition("] ")[2] for line in said] == seen
