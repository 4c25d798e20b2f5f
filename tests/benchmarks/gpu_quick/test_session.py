"""A session in one command: with processes that answer at once, and at toy size on a CPU."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.contest import pool as contest_pool
from benchmarks.gpu_quick import expected, session

PROCESS = """\
import json, shutil, sys

fields = json.loads(sys.argv[1])
task = fields["task"]
if [task["kind"], task["setting"]] == FAILS:
    print("beside a line of torch", file=sys.stderr)
    sys.exit("no kernel image")
shutil.copy("GRADIENTS", fields["gradients"])
peak = {"plain": 100, "checkpoint": 40, "torch": 60}.get(task["kind"], 30) << 20
budget = task["memory_budget"] if isinstance(task["memory_budget"], int) else None
point = {"kind": task["kind"], "setting": task["setting"], "budget_bytes": budget, "message": fields["options"].get("device", "")}
if task["kind"] != "exact":
    point |= {"peak_bytes": budget or peak, "predicted_peak_bytes": budget or peak}
print(json.dumps(point), flush=True)
for line in sys.stdin:
    launches = [None, [[0, "gemm", 5, "aten::mm", []]], None]
    print(json.dumps(launches if line.strip() == "kernels" else [100, 200, 300]), flush=True)
"""

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A session of the GPT on a CPU whose processes and commands answer at once."""

    def begun(*flags: str, fails: Sequence[str] = (), calibrated: int = 0) -> int:
        script = tmp_path / "process.py"
        torch.save([torch.ones(2)], tmp_path / "ones.pt")
        script.write_text(PROCESS.replace("FAILS", repr(list(fails))).replace("GRADIENTS", str(tmp_path / "ones.pt")))
        monkeypatch.setattr(contest_pool, "COMMAND", (sys.executable, str(script)))

        def printed(module: str, given: Sequence[str], limit_s: float) -> tuple[str, int]:
            assert limit_s > 0
            Path(given[given.index("--out" if "--out" in given else "--json") + 1]).write_text("{}")
            return ("copy 1.0" if module == "compile_remat" else "ok: resnet, all: median 1.00"), calibrated

        monkeypatch.setattr(session, "_printed", printed)
        out = ["--out", str(tmp_path / "out")]
        return gpu.main(["--quick", "--toy", "--device", "cpu", "--model", "gpt", "--workers", "2", *out, *flags])

    return begun


def test_a_session_leaves_few_files_and_says_what_it_took(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    out = tmp_path / "out"
    names = {path.name for path in out.iterdir()}
    assert names - {"frontiers.png"} == {"device.json", "gpt.json", "quick.json", "launches.jsonl.gz", "log.txt"}
    document = json.loads((out / "quick.json").read_text())
    assert [part["name"] for part in document["parts"]] == [
        "calibrate", "compile", "time", "launches", "time again", "convolutions", "picture",
    ]  # fmt: skip
    assert all(part["took_s"] is not None and not part["is_failed"] for part in document["parts"])
    assert (
        document["calibration"] == ["copy 1.0"]
        and document["header"]["options"] == "compiler=eager device=device.json oom_retry=0"
    )
    points = {
        f"{point['kind']} {point['setting']}": point for point in json.loads((out / "gpt.json").read_text())["points"]
    }
    assert set(points) == {
        "plain default", "checkpoint blocks", "torch 0.5", "remat at checkpoint blocks", "remat at torch 0.5", "remat min",
        "remat at checkpoint blocks, offload",
    }  # fmt: skip
    assert all(point["visits_ns"] == [200] * 4 for point in points.values())
    assert points["remat min"]["message"] == str(out / "device.json")  # its prices are those that were just measured
    lines = [json.loads(line) for line in gzip.decompress((out / "launches.jsonl.gz").read_bytes()).splitlines()]
    assert {line["point"] for line in lines} == set(points)
    assert lines[0]["model"] == "gpt" and lines[0]["kernels"] == [["gemm", 5, 1]]
    printed = capsys.readouterr()
    total = sum(part["expected_s"] for part in document["parts"])
    assert f"expected to take {total:.0f} s of the device, 480 at most" in printed.out
    assert "of the device (cpu" in printed.out and "; missed: 0" in printed.out
    assert "-     convolutions: resnet, all: median 1.00" in printed.out
    log = (out / "log.txt").read_text()
    assert "missed: 0" in log and "gpt: plain default" in log  # of standard output and of standard error


def test_what_fails_is_missed_and_the_rest_goes_on(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fails=["torch", "0.5"], calibrated=1) == 1
    printed = capsys.readouterr().out
    assert "MISS  calibrate: failed: RuntimeError: calibrate ended with status 1" in printed
    assert "MISS  gpt: torch 0.5: ended with status 1; last line: no kernel image" in printed
    assert "; missed: 2" in printed
    assert "beside a line of torch" in (tmp_path / "out" / "log.txt").read_text()
    points = json.loads((tmp_path / "out" / "gpt.json").read_text())["points"]
    assert len([point for point in points if point["visits_ns"]]) == 5  # ours at its peak is none


def test_a_session_that_is_broken_off_tells_what_it_has(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def profile(self: object, deadline: float) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not seen")

    monkeypatch.setattr(contest_pool.Pool, "profile", profile)
    before = signal.getsignal(signal.SIGTERM)
    assert run() == 1
    assert "KeyboardInterrupt SIGTERM" in capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "quick.json").read_text())
    assert [part["note"] for part in document["parts"]][3:] == ["broken off", *["not reached"] * 3]
    points = json.loads((tmp_path / "out" / "gpt.json").read_text())["points"]
    assert all(point["visits_ns"] == [200] * 2 for point in points)
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_time_for_all(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--minutes", "0") == 0 and "left out: it may take" in capsys.readouterr().out
    assert not (tmp_path / "out" / "gpt.json").exists()


def test_points_and_parts_of_a_session_fit_into_eight_minutes() -> None:
    parts = expected.parts(expected.MODELS, 15, is_toy=False)
    assert sum(part.expected_s for part in parts) <= 440
    assert [task.kind for task in expected.tasks("resnet50", [])] == ["plain", "checkpoint", "torch", "remat", "exact"]
    assert [task.kind for task in expected.tasks("gpt", [])] == ["plain", "checkpoint", "torch", "remat"]
    assert [part.name for part in expected.parts(["gpt"], 2, is_toy=True, runs=False)] == ["compile"]
    few = expected.parts(expected.MODELS, 1, is_toy=False)
    assert few[1].name == "compile" and few[1].expected_s > parts[1].expected_s


def test_a_command_that_takes_too_long_is_ended() -> None:
    text, status = session._printed("this", ["--version"], 10.0)
    assert status == 0 and "Zen" in text
    with pytest.raises(RuntimeError, match="was ended after 0 s"):
        session._printed("http.server", ["--bind", "127.0.0.1", "0"], 0.0)


def test_quick_has_points_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--quick", "--torch", "0.1"], ["--quick", "--retry"], ["--quick", "--device", "cpu"]):
        with pytest.raises(SystemExit):
            gpu.main(flags)
    assert "no --torch and no --retry" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--quick", "--out", str(tmp_path / "out")])
    assert "torch finds no CUDA device here" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_toy_session_on_a_cpu(own_caches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--quick", "--toy", "--device", "cpu", "--model", "resnet50", "--workers", "2", "--minutes", "15"]
    assert gpu.main([*flags, "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "quick.json").read_text())
    assert all(part["took_s"] is not None and not part["is_failed"] for part in document["parts"])
    assert document["convolutions"]["rows"]
    assert json.loads((tmp_path / "device.json").read_text())["flops_per_s"]
    points = {point["kind"]: point for point in json.loads((tmp_path / "resnet50.json").read_text())["points"]}
    assert points.keys() == {"plain", "checkpoint", "torch", "remat", "exact"}
    assert points["exact"]["exact_difference"] == 0.0 and points["exact"]["step_ns"] is None
    for kind in ("plain", "checkpoint", "torch", "remat"):
        assert 0.0 < points[kind]["exact_difference"] < 1.0 and points[kind]["step_ns"] > 0
    assert "resnet50: remat min: gradients" in capsys.readouterr().out
