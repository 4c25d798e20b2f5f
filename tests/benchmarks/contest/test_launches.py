"""The launches of steady steps: of a trace as a GPU writes it, and of a CPU's own steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.contest import frontier, launches
from benchmarks.contest.frontier import Point
from benchmarks.contest.launches import STEPS, Launch


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


TRACE = [
    event("user_annotation", "ProfilerStep#5", 0, 10),
    event("user_annotation", "ProfilerStep#6", 10, 10),
    event("cpu_op", "aten::mm", 1, 2, **{"External id": 7, "Input Dims": [[8, 4], [4, 2]]}),
    event("cpu_op", "triton_poi_fused_gelu_0", 4, 1, **{"External id": 8}),
    event("cpu_op", "aten::mm", 11, 2, **{"External id": 9, "Input Dims": [[8, 4], [4, 2]]}),
    event("kernel", "nvjet_sm90", 12, 3.5, **{"External id": 7}),
    event("kernel", "triton_poi_fused_gelu_0", 16, 1.25, **{"External id": 8}),
    event("gpu_memset", "Memset (Device)", 18, 0.5),
    event("kernel", "nvjet_sm90", 25, 4.5, **{"External id": 9}),
    {"ph": "M", "name": "process_name"},
]


def test_each_kernel_has_its_operator_and_the_step_that_launched_it() -> None:
    """The first kernels run while the host launches the second step already."""
    dims = ([8, 4], [4, 2])
    assert launches.of_trace(TRACE, is_cuda=True) == [
        Launch(0, "nvjet_sm90", 3500, "aten::mm", dims),
        Launch(0, "triton_poi_fused_gelu_0", 1250, "triton_poi_fused_gelu_0"),
        Launch(0, "Memset (Device)", 500),
        Launch(1, "nvjet_sm90", 4500, "aten::mm", dims),
    ]


def test_sums_are_those_of_one_step() -> None:
    rows = launches.of_trace(TRACE, is_cuda=True)
    assert launches.sums(rows) == [
        ("nvjet_sm90", 4000, 1),
        ("triton_poi_fused_gelu_0", 625, 1),
        ("Memset (Device)", 250, 1),
    ]


def test_steps_of_a_cpu_are_recorded() -> None:
    x, w = torch.randn(16, 8), torch.randn(4, 8)
    ran = 0

    def step() -> None:
        nonlocal ran
        ran += 1
        torch.nn.functional.linear(x, w).relu()

    found = launches.recorded(step, "cpu")
    assert ran == launches.WARM + STEPS
    assert [launch.step for launch in found] == sorted(2 * list(range(STEPS)))
    assert [launch.operator for launch in found] == ["aten::linear", "aten::relu"] * STEPS
    assert found[0].shapes[:2] == ([16, 8], [4, 8])
    assert all(launch.time_ns > 0 for launch in found)
    assert launches.clocks("cpu") is None


def test_launches_and_sums_are_written(tmp_path: Path) -> None:
    found = launches.profiled(lambda: torch.ones(4).exp(), "cpu")
    profiles = {"plain default": json.loads(json.dumps(found))}
    gpu.write_profiles(tmp_path / "gpt", profiles)
    written = json.loads((tmp_path / "gpt.launches.json").read_text())["plain default"]
    assert written["clocks_before"] is None and len(written["launches"]) == len(found[1])
    kernels = json.loads((tmp_path / "gpt.kernels.json").read_text())["plain default"]
    assert {name for name, _, _ in kernels} == {"aten::ones", "aten::exp"}


def test_a_driver_without_its_tool_has_no_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(launches.subprocess, "run", missing)
    assert launches.clocks("cuda") is None


def test_quartiles_are_printed_of_points_that_were_timed() -> None:
    timed = Point("plain", "default", step_ns=86_000_000, step_low_ns=84_900_000, step_high_ns=88_700_000, steps=16)
    assert list(frontier.quartiles([timed, Point("eager", "-")])) == [
        "plain default: quartiles of 16 steps 84.9, 86.0, 88.7 ms"
    ]
