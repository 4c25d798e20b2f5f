"""Points that are compiled at once and timed alone: with processes that compile nothing and answer by a list."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.contest import pool as contest_pool
from benchmarks.contest import runs
from benchmarks.contest.frontier import Point
from benchmarks.contest.pool import ROUNDS, Pool
from benchmarks.contest.runs import Task

MIB = 1 << 20

PROCESS = """\
import json, os, shutil, signal, sys, time

fields = json.loads(sys.argv[1])
task = fields["task"]
if task["kind"] == "eager":
    sys.exit("this is why")
if (task["kind"], task["setting"]) == ("remat", "min"):
    time.sleep(fields["sleep_s"])
peak = {"plain": 100, "checkpoint": 40, "torch": 60}.get(task["kind"], 30) << 20
shutil.copy(fields["folder"] + ("/twos.pt" if task["kind"] == "torch" else "/ones.pt"), fields["gradients"])
budget = task["memory_budget"] if isinstance(task["memory_budget"], int) else None
print("a line that is no answer")
point = {"kind": task["kind"], "setting": task["setting"], "budget_bytes": budget, "peak_bytes": peak}
print(json.dumps(point), flush=True)
for line in sys.stdin:
    what = fields.get("answers", {}).get(task["kind"])
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hangs":
        time.sleep(600)
    if what == "fails":
        print(json.dumps({"failure": "OutOfMemoryError: no room"}), flush=True)
        continue
    with open(fields["folder"] + "/log", "a") as log:
        log.write(line.strip() + " " + task["kind"] + " " + task["setting"] + "\\n")
    print(json.dumps([100, 200, 300]), flush=True)
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pool:
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    monkeypatch.setattr(contest_pool, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(runs, "TORCH_BUDGETS", (0.5,))
    for name, value in (("ones", 1.0), ("twos", 2.0)):
        torch.save([torch.full((4,), value)], tmp_path / f"{name}.pt")
    kept: dict[str, Sequence[Point]] = {}
    fields: dict[str, Any] = {"device": "cpu", "folder": str(tmp_path), "sleep_s": 0}
    return Pool(["model"], fields, tmp_path, 4, kept.__setitem__, lambda *_: None)


def test_all_points_are_compiled_and_each_is_timed_in_every_round(pool: Pool) -> None:
    assert pool.run(1.0) == f"timed in {ROUNDS} rounds, each point alone"
    points = {point.name: point for point in pool.points("model")}
    assert set(points) == {
        "plain default", "remat 0.5", "remat 0.3", "checkpoint blocks", "eager -", "remat max", "torch 0.5",
        "remat at checkpoint blocks", "remat at torch 0.5", "remat min",
    }  # fmt: skip
    assert points["remat 0.5"].budget_bytes == 50 * MIB  # of plain's peak, which was measured first
    assert points["remat at torch 0.5"].budget_bytes == 60 * MIB
    assert (
        points["eager -"].failure == "ended with status 1; last line: this is why" and points["eager -"].step_ns is None
    )
    timed = [point for point in points.values() if point.failure is None]
    assert all((point.step_ns, point.steps) == (200, 3 * ROUNDS) for point in timed)
    assert all(point.visits_ns == [200] * ROUNDS for point in timed)
    assert points["torch 0.5"].gradient_difference == 1.0 and points["remat min"].gradient_difference == 0.0
    asked = (pool.folder / "log").read_text().split("\n")[:-1]
    rounds = [asked[k * len(timed) : (k + 1) * len(timed)] for k in range(ROUNDS)]
    assert len(asked) == (ROUNDS + 1) * len(timed) and rounds[0] == rounds[1]
    order = [line.removeprefix("time ") for line in rounds[0]]
    assert order[order.index("checkpoint blocks") + 1] == "remat at checkpoint blocks"
    assert order[order.index("torch 0.5") + 1] == "remat at torch 0.5"
    assert all(line.startswith("time ") for line in rounds[0])
    assert sorted(asked[ROUNDS * len(timed) :]) == sorted(line.replace("time", "kernels") for line in rounds[0])
    assert all(member.process.poll() is not None for member in pool.members)


def test_what_is_not_compiled_in_time_is_left_out(pool: Pool) -> None:
    pool.fields = {**pool.fields, "sleep_s": 600}
    start = time.monotonic()
    told = pool.run(0.1)
    assert time.monotonic() - start < 60
    assert "not compiled in time: model remat min" in told
    assert "remat min" not in {point.name for point in pool.points("model")}
    assert torch.load(pool.folder / "model plain default.pt")[0].sum() == 4


def few(model: str, points: Sequence[Point]) -> list[Task]:
    return [Task("plain", "default"), Task("checkpoint", "blocks"), Task("torch", "0.5"), Task("exact", "float64")]


def test_visits_of_a_model_alternate_and_gradients_are_compared_with_float64(pool: Pool) -> None:
    pool.tasks = few
    with pool.ended():
        assert pool.compile(time.monotonic() + 60) == []
        pool.compare()
        assert pool.time(time.monotonic() + 60, visits=2)
    asked = (pool.folder / "log").read_text().split("\n")[:-1]
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]
    points = {point.name: point for point in pool.points("model")}
    assert points["plain default"].exact_difference == 0.0 and points["torch 0.5"].exact_difference == 1.0


def test_nothing_is_begun_that_would_end_too_late(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.tasks = few
    monkeypatch.setitem(contest_pool.ASKED_S, "time", 100.0)
    with pool.ended():
        pool.compile(time.monotonic() + 60)
        assert not pool.time(time.monotonic() + 90) and not (pool.folder / "log").exists()
        assert pool.time(time.monotonic() + 110) and pool.profile(time.monotonic() + 60)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("dies", "asked for time: ended with status -9 by SIGKILL, as by a system that is out of memory"),
        ("hangs", "asked for time: no answer for 1 s"),
        ("fails", "asked for time: OutOfMemoryError: no room"),
    ],
)
def test_a_process_that_fails_while_it_is_timed_says_so(
    what: str, found: str, pool: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contest_pool, "ANSWER_S", 1.0)
    pool.tasks, pool.fields = few, {**pool.fields, "answers": {"torch": what}}
    with pool.ended():
        pool.compile(time.monotonic() + 60)
        assert pool.time(time.monotonic() + 60, visits=2) and pool.profile(time.monotonic() + 60)
    points = {point.name: point for point in pool.points("model")}
    assert points["torch 0.5"].failure == found and points["torch 0.5"].peak_bytes == 60 * MIB
    assert f"model torch 0.5: {found.removeprefix('asked for ')}" in capsys.readouterr().err
    assert points["checkpoint blocks"].failure is None and points["checkpoint blocks"].steps == 6
