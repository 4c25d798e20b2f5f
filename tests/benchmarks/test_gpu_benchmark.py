"""`python -m benchmarks.gpu` on a CPU: the order of its points, going on, stopping, what the points show, and a whole toy run."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import gpu
from benchmarks.common import harness
from benchmarks.contest import frontier, runs
from benchmarks.contest.frontier import Point
from benchmarks.contest.runs import Task, tasks
from benchmarks.models import TOY_SCALE, large
from benchmarks.models.building import Built
from benchmarks.models.large import build_large, checkpointed

MIB = 1 << 20


class Chain(nn.Module):
    """Few kernels, so that it compiles quickly: linear layers and sines."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(6)]
        self.blocks = nn.ModuleList(nn.Sequential(layer, Sine(), Sine()) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def chain(scale: float) -> Built:
    """6 x (Linear 128, sine, sine), batch 2048"""
    return Chain(128), (torch.randn(2048, 128),)


@pytest.mark.parametrize("name", large.LARGE)
def test_large_models_train_in_bfloat16_and_are_the_same_when_checkpointed(name: str) -> None:
    losses, gradients = [], []
    for change in (lambda case: case, checkpointed):
        case = change(build_large(name, device="cpu", scale=TOY_SCALE))
        torch.manual_seed(1)
        loss = harness.Training.loss(case.module(*case.inputs))
        loss.backward()
        losses.append(loss.item())
        gradients.append(runs.samples([p.grad for p in case.module.parameters()]))
        assert {p.dtype for p in case.module.parameters()} == {torch.bfloat16}
        assert all(p.grad is not None for p in case.module.parameters()) and case.note
    assert losses[0] == losses[1]
    assert runs.differences(*gradients) == (0.0, 0.0)


def test_full_sizes_are_those_that_their_notes_tell() -> None:
    with torch.device("meta"):
        modules = {name: make(1.0) for name, make in large.LARGE.items()}
    counts = {name: sum(p.numel() for p in module.parameters()) for name, (module, _) in modules.items()}
    shapes = {name: tuple(inputs[0].shape) for name, (_, inputs) in modules.items()}
    assert shapes == {"gpt": (16, 2048), "llama": (8, 4096), "bert_large": (64, 512), "resnet50": (768, 3, 224, 224)}
    assert counts["resnet50"] == pytest.approx(25.6e6, rel=0.01)  # He et al. 2016
    assert counts["bert_large"] == pytest.approx(335e6, rel=0.02)  # Devlin et al. 2019
    assert 0.7e9 < counts["llama"] < counts["gpt"] < 1e9


def _points() -> list[Point]:
    """A finished contest: checkpoint and torch's 0.3 at 40 MiB, its 0.5 as plain; ours faster at each peak."""

    def ours(setting: str, budget: int | None, peak: int, step: int) -> Point:
        return Point(
            "remat", setting, None if budget is None else budget * MIB, peak_bytes=peak * MIB, step_ns=step,
            predicted_peak_bytes=peak * MIB, predicted_step_ns=step, extra_ns=step - 100, bound_ns=step - 101,
        )  # fmt: skip

    return [
        Point("plain", "default", peak_bytes=100 * MIB, step_ns=100),
        ours("0.5", 50, 49, 104),
        ours("0.3", 30, 30, 110),
        Point("checkpoint", "blocks", peak_bytes=40 * MIB, step_ns=130),
        Point("torch", "0.5", peak_bytes=100 * MIB, step_ns=101),
        Point("torch", "0.3", peak_bytes=40 * MIB, step_ns=120),
        ours("at checkpoint blocks", 40, 40, 106),
    ]


def test_the_most_telling_points_come_first_and_rivals_are_matched_once() -> None:
    assert [f"{t.kind} {t.setting}" for t in tasks([])][:3] == ["plain default", "checkpoint blocks", "eager -"]
    points = _points()
    left = list(tasks(points[:1]))
    assert left[:3] == [Task("remat", "0.5", 50 * MIB), Task("remat", "0.3", 30 * MIB), Task("checkpoint", "blocks")]
    assert left[3:5] == [Task("eager", "-"), Task("remat", "max", "max")]
    assert [t.setting for t in left if t.kind == "torch"] == ["0.5", "0.3", "0.1", "0.7", "0.9", "0"]
    matches = [t for t in tasks(points[:6]) if t.setting.startswith("at ")]
    assert matches == [
        Task("remat", "at checkpoint blocks", 40 * MIB)
    ]  # torch's 0.3 lies there, too, its 0.5 at plain's
    assert Task("remat", "at checkpoint blocks", 40 * MIB) not in list(tasks(points))


def test_what_the_points_show() -> None:
    points = _points()
    assert frontier.measured_extra(points[1], points) == pytest.approx(0.04)
    assert points[1].extra_share == pytest.approx(0.04) and points[1].bound_share == pytest.approx(0.03)
    beaten = [(rival.name, best.name, ratio) for rival, best, ratio in frontier.rivals_beaten(points)]
    assert beaten == [
        ("checkpoint blocks", "remat at checkpoint blocks", 106 / 130),
        ("torch 0.5", "remat 0.5", 104 / 101),
        ("torch 0.3", "remat at checkpoint blocks", 106 / 120),
    ]
    lines, missed = frontier.summary(points, is_timed=True)
    assert missed == 1 and "miss: above 1.000" in next(line for line in lines if line.startswith("torch 0.5"))
    assert frontier.summary(points, is_timed=False)[1] == 0
    assert "predicted peak: off by 0.00% in the median, 0.00% at worst" in lines


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"peak_bytes": 51 * MIB, "predicted_peak_bytes": 51 * MIB}, ["above the budget"]),
        ({"predicted_peak_bytes": 51 * MIB}, ["predicted peak off by more than 3%"]),
        ({"predicted_step_ns": 130}, ["predicted time off by more than 15%"]),
        ({"bound_ns": 0}, ["extra time more than 2% of the step above the bound"]),
        ({"failure": "OutOfMemoryError: CUDA\nmore"}, ["OutOfMemoryError: CUDA"]),
        ({}, []),
    ],
)
def test_each_shortfall_is_named(changes: dict[str, int], found: list[str]) -> None:
    points = _points()
    changed = replace(points[1], **changes)  # type: ignore[arg-type]
    assert frontier.shortfalls(changed, points, is_timed=True) == found


def test_gradients_are_compared_by_evenly_spaced_samples() -> None:
    gradient = torch.arange(100_000.0)
    (found,) = runs.samples([gradient])
    assert len(found) == runs.SAMPLES and found[0] == 0 and found[-1] > 99_900
    assert runs.samples([None])[0].numel() == 0
    total, worst = runs.differences(
        [torch.tensor([3.0]), torch.tensor([4.4])], [torch.tensor([3.0]), torch.tensor([4.0])]
    )
    assert total == pytest.approx(0.4 / 5) and worst == pytest.approx(0.1)


class _Instant(runs.Contest):
    """Measures nothing: every point takes 100 s of the clock that the test turns."""

    def __init__(self) -> None:
        self.name, self.device, self.now = "model", "cpu", 0.0

    def take(self, task: Task) -> Point:
        self.now += 100.0
        return Point(task.kind, task.setting, peak_bytes=100 * MIB, step_ns=100, wall_s=100.0)


def test_it_stops_before_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    instant, points, kept = _Instant(), [], []  # type: ignore[var-annotated]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: instant.now)
    text = gpu.measure(instant, points, 420.0, lambda: kept.append(len(points)))
    assert kept == [1, 2, 3]  # a fourth may take 150 s, as the first of its kind, and 120 are left
    assert text == "stopped: the next point (checkpoint blocks) may take 150 s, 120 s are left; run it again to go on"
    instant.now = 0.0
    assert gpu.measure(instant, points, 1e6, lambda: None) == "finished: every point is measured"
    assert next(tasks(points), None) is None


def test_a_dead_device_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(_Instant):
        def take(self, task: Task) -> Point:
            return Point(task.kind, task.setting, failure="RuntimeError: CUDA error")

    monkeypatch.setattr(gpu, "is_alive", lambda device: False)
    points: list[Point] = []
    assert "cpu does not answer any more" in gpu.measure(Broken(), points, 1e12, lambda: None)
    assert len(points) == 1


def _header(**changes: str) -> dict[str, str]:
    return {"device": "cuda (H200)", "torch": "2.11", "size": "full", "options": "none", "date": "2026"} | changes


def test_points_of_other_conditions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpt.json"
    assert frontier.read(path, _header()) == []
    frontier.write(path, "gpt", _header(), _points())
    assert frontier.read(path, _header(date="2027")) == _points()
    with pytest.raises(ValueError, match=r"measured with torch = 2\.11, this is 2\.13"):
        frontier.read(path, _header(torch="2.13"))
    path.write_text("[]")
    with pytest.raises(ValueError, match="no file of this version"):
        frontier.read(path, _header())


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier.importlib.util, "find_spec", lambda name: None)
    assert not frontier.draw(tmp_path / "x.png", _header(), {"gpt": _points()})
    assert not (tmp_path / "x.png").exists()


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert frontier.draw(tmp_path / "x.png", _header(), {"gpt": _points()})
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert not frontier.draw(tmp_path / "y.png", _header(), {"gpt": [Point("plain", "default", failure="x")]})


def test_full_size_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu"])
    assert "without a GPU, say --toy" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError):
        gpu._option("cost_model")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, own_caches: None) -> Iterator[None]:
    """One model that compiles quickly, and few of torch's budgets."""
    monkeypatch.setitem(large.LARGE, "chain", chain)
    monkeypatch.setattr(runs, "TORCH_BUDGETS", (0.5,))
    yield


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_toy_run_and_going_on(compiler: str, small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "chain", "--toy", "--device", "cpu", "--out", str(tmp_path), "--option", f"compiler={compiler}"]
    assert gpu.main([*flags, "--minutes", "0"]) == 0
    first = json.loads((tmp_path / "chain.json").read_text())["points"]
    assert [p["kind"] for p in first] == ["plain"]  # the first point is begun whatever it takes
    gpu.main([*flags, "--minutes", "30"])
    document = json.loads((tmp_path / "chain.json").read_text())
    points = {f"{p['kind']} {p['setting']}": p for p in document["points"]}
    assert document["points"][0] == first[0]
    assert document["header"]["options"] == f"compiler={compiler}"
    assert list(points)[:4] == ["plain default", "remat 0.5", "remat 0.3", "checkpoint blocks"]
    assert {"eager -", "remat max", "torch 0.5", "remat min"} <= points.keys()
    plain = points["plain default"]
    for name, point in points.items():
        assert point["failure"] is None, name
        assert point["floor_bytes"] or (point["peak_bytes"] > 0 and point["step_ns"] > 0), name
        if point["peak_bytes"]:
            assert point["gradient_bytes"] == plain["gradient_bytes"], name
            assert point["gradient_difference"] < 0.05, name
    half = points["remat 0.5"]
    assert half["budget_bytes"] == int(0.5 * plain["peak_bytes"])  # oneDNN's copies in bfloat16 are not foreseen
    assert half["bound_ns"] <= half["extra_ns"] < half["predicted_step_ns"] and half["planning_s"] > 0
    assert half["predicted_peak_bytes"] > 0 and (compiler == "eager" or half["scheduled_peak_bytes"] > 0)
    printed = capsys.readouterr().out
    assert "finished: every point is measured" in printed and "predicted step time: off by" in printed


def test_a_failing_point_is_recorded_and_may_be_retried(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(scale: float) -> Built:
        """does not run"""
        module, inputs = chain(scale)
        return module, (inputs[0][:, :3],)

    flags = ["--model", "chain", "--toy", "--device", "cpu", "--out", str(tmp_path), "--minutes", "0"]
    flags += ["--option", "compiler=eager"]
    monkeypatch.setitem(large.LARGE, "chain", broken)
    assert gpu.main(flags) == 1
    (point,) = json.loads((tmp_path / "chain.json").read_text())["points"]
    assert "RuntimeError" in point["failure"] and point["peak_bytes"] is None and point["wall_s"] > 0
    assert "no picture" in capsys.readouterr().out
    monkeypatch.setitem(large.LARGE, "chain", chain)
    assert gpu.main([*flags, "--retry"]) == 0
    (point,) = json.loads((tmp_path / "chain.json").read_text())["points"]
    assert point["failure"] is None and point["peak_bytes"] > 0
