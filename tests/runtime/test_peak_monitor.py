"""Measured peaks in reports: read from a made-up allocator, and measured on CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_remat
from compile_remat.backend import remat
from compile_remat.compilation import regions
from compile_remat.device.measure import peak_bytes
from compile_remat.runtime import peak_monitor
from compile_remat.runtime.peak_monitor import TRIES, Reading, reader_of

ROWS, WIDTH = 1024, 64
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


pytestmark = pytest.mark.usefixtures("fresh", "own_caches")


class Model(nn.Module):
    """A graph with its loss inside, so that nothing large is allocated beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.sin(self.first(x)).exp())).square().mean()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=remat, options={"memory_budget": "min", "compiler": "eager", **options})


def step(model: nn.Module, call: Any) -> None:
    model.zero_grad(set_to_none=True)
    call(X).backward()


class Allocator:
    """An allocator that reports a level and a highest level from a list, in order."""

    def __init__(self, readings: Sequence[tuple[int, int]]) -> None:
        self.left = [Reading(*reading) for reading in readings]

    def __call__(self) -> Reading:
        return self.left.pop(0)


def with_allocator(monkeypatch: pytest.MonkeyPatch, readings: Sequence[tuple[int, int]]) -> Allocator:
    allocator = Allocator(readings)
    monkeypatch.setattr(regions, "reader_of", lambda device: allocator)
    return allocator


def measured() -> list[int | None]:
    return [report.measured_peak_bytes for report in compile_remat.reports()]


# -- from the allocator -----------------------------------------------------------------------------------------------


def test_the_first_step_that_raises_the_highest_level_is_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = with_allocator(monkeypatch, [(100, 900), (150, 900), (120, 900), (130, 1000)])
    model = Model()
    call = compiled(model)
    step(model, call)
    assert measured() == [None]  # the user's own statistics were higher
    step(model, call)
    assert measured() == [1000 - 120] and not compile_remat.reports()[0].measured_in_first_call
    step(model, call)
    step(model, call)
    assert allocator.left == []  # nobody asks any more


def test_a_first_call_tunes_kernels_and_is_no_measure_of_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    with_allocator(monkeypatch, [(100, 100), (150, 1100)])
    model = Model()
    call = compiled(model)
    step(model, call)
    (report,) = compile_remat.reports()
    assert report.measured_peak_bytes == 1000 and report.measured_in_first_call
    assert report.prediction_error is None
    assert "in the first call, with the tuning of kernels" in str(report)
    with compile_remat.measured_step("cpu") as taken:
        step(model, call)
    (report,) = compile_remat.reports()
    assert report.measured_peak_bytes == taken.peak_bytes and not report.measured_in_first_call
    assert report.prediction_error is not None and "in the first call" not in str(report)


def test_only_some_steps_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = with_allocator(monkeypatch, [(0, 9)] * 2 * TRIES)
    model = Model()
    call = compiled(model)
    for _ in range(TRIES + 2):
        step(model, call)
    assert allocator.left == [] and measured() == [None]


def test_a_region_beside_others_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with_allocator(monkeypatch, [(0, 0), (10, 50), (20, 60), (0, 60)])
    first, second = Model(), Model()
    calls = [compiled(model, instances=1) for model in (first, second)]
    loss = calls[0](X)
    other = calls[1](X)
    other.backward()  # nothing began since its forward did
    loss.backward()
    values = measured()
    assert values[-1] == 60 - 10 and values.count(None) == len(values) - 1


def test_a_forward_without_gradients_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = with_allocator(monkeypatch, [(0, 0), (5, 80)])
    model = Model()
    call = compiled(model)
    with torch.no_grad():
        call(X)
    assert len(allocator.left) == 2
    step(model, call)
    assert measured() == [None, 80]


def test_the_cpu_keeps_no_statistics() -> None:
    assert reader_of(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("budget", ["max", "min"])
def test_the_first_step_on_cuda_is_measured(budget: str) -> None:
    model, x = Model().cuda(), torch.randn(65536, WIDTH, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    call = compiled(model, memory_budget=budget, compiler="inductor")
    call(x).backward()
    most = torch.cuda.max_memory_allocated()
    (report,) = compile_remat.reports()
    assert report.measured_peak_bytes is not None and report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= most == torch.cuda.max_memory_allocated()
    assert report.measured_in_first_call
    model.zero_grad(set_to_none=True)
    with compile_remat.measured_step() as taken:
        call(x).backward()
    assert taken.peak_bytes is not None
    assert taken.peak_bytes < report.measured_peak_bytes  # nothing is tuned any more
    assert abs(taken.peak_bytes - report.predicted_peak_bytes) < 0.01 * report.predicted_peak_bytes
    assert compile_remat.reports()[0].measured_peak_bytes == taken.peak_bytes


# -- measured_step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", [pytest.param("eager", marks=pytest.mark.proof), "inductor"])
def test_a_step_is_measured_and_its_report_shows_it(compiler: str, tmp_path: Path) -> None:
    model = Model()
    call = compiled(model, compiler=compiler, report_dir=str(tmp_path / "reports"))
    step(model, call)
    assert measured() == [None]
    model.zero_grad(set_to_none=True)
    with compile_remat.measured_step("cpu") as taken:
        assert taken.peak_bytes is None
        call(X).backward()
    model.zero_grad(set_to_none=True)
    again = peak_bytes(lambda: call(X).backward(), "cpu").peak_bytes
    (report,) = compile_remat.reports()
    assert taken.peak_bytes == report.measured_peak_bytes == again
    assert taken.ran == [report.graph_key]
    assert "measured peak" in str(report) and report.prediction_error is not None
    (path,) = (tmp_path / "reports").iterdir()
    assert json.loads(path.read_text())["measured_peak_bytes"] == taken.peak_bytes


def test_a_step_of_several_runs_is_measured_as_a_whole() -> None:
    first, second = Model(), Model()
    calls = [compiled(model) for model in (first, second)]
    for model, call in zip((first, second), calls, strict=True):
        step(model, call)
    before = compile_remat.reports()
    with compile_remat.measured_step("cpu") as taken:
        (calls[0](X) + calls[1](X)).backward()
    assert len(taken.ran) == 2 and taken.peak_bytes is not None and taken.peak_bytes > X.nbytes
    assert compile_remat.reports()[: len(before)] == before and not any(measured())


def test_a_report_from_the_cache_is_completed_too() -> None:
    model = Model()
    with torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(2):
            call = compiled(model, compiler="inductor")
            step(model, call)
            torch.compiler.reset()
        first, second = compile_remat.reports()
        assert (first.from_cache, second.from_cache) == (False, True)
        with compile_remat.measured_step("cpu") as taken:
            step(model, call)
    assert taken.peak_bytes is not None
    assert [m for m in measured() if m] == [taken.peak_bytes]
    assert compile_remat.reports()[-1].from_cache


def test_a_body_that_fails_is_no_measurement() -> None:
    with pytest.raises(ZeroDivisionError), compile_remat.measured_step("cpu") as taken:
        raise ZeroDivisionError
    assert taken.peak_bytes is None
    assert peak_monitor._STEP.get() is None


def test_a_device_without_an_allocator_is_refused() -> None:
    with pytest.raises(ValueError, match="'meta'"), compile_remat.measured_step("meta"):
        pass


def test_reports_that_were_forgotten_stay_so() -> None:
    model = Model()
    call = compiled(model)
    step(model, call)
    compile_remat.reset_reports()
    with compile_remat.measured_step("cpu") as taken:
        step(model, call)
    assert taken.peak_bytes and compile_remat.reports() == []
