"""The process in which a step is lowered, and the message if it is not lowered."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from compile_remat._torch.fake_cuda import hooks
from compile_remat._torch.fake_cuda.device import H100, FakeDevice
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import device_names, load_device
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.forecasting import forecast
from compile_remat.forecast.frontier_forecast import forecast_frontier
from compile_remat.forecast.lowering import elsewhere
from compile_remat.forecast.lowering.elsewhere import fake_device, lowered_for, obstacle_to
from compile_remat.forecast.lowering.observing import Asked, NotObserved
from compile_remat.forecast.target_step import Target

ATTENTION = Builder("tests.planned_models:attention", batch=2, dtype="bf16")
H100_SXM = Target("h100-sxm", MemoryBudget.parse("0.7"))


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """g++ and triton, on this machine or not."""
    monkeypatch.setattr(hooks, "obstacle", lambda: "")


def test_every_device_is_lowered_or_there_is_a_reason(there: None) -> None:
    reasons = {name: obstacle_to(load_device(name)) for name in device_names()}
    without = {name: reason.why for name, reason in reasons.items() if reason is not None}
    assert set(without) == {"mi250x", "mi300x", "p100"}
    assert "no CUDA device" in without["mi300x"] and "6.0" in without["p100"]


def test_a_file_says_which_compute_capability(there: None, tmp_path: Path) -> None:
    figures = {"bandwidth_bytes_per_s": 10**12, "flops_per_s": {"float32": 10**13}}
    for capability, is_lowered in ((None, False), ("8.6", True)):
        own = figures if capability is None else {**figures, "compute_capability": capability}
        (tmp_path / "own.json").write_text(json.dumps(own))
        reason = obstacle_to(load_device(str(tmp_path / "own.json")))
        assert (reason is None) is is_lowered
        assert reason is None or "compute_capability" in reason.remedy


def test_the_fake_device_has_the_figures_of_the_target() -> None:
    h100, a10 = (fake_device(load_device(name)) for name in ("h100-sxm", "a10"))
    same = ("capability", "multiprocessors", "l2_bytes")
    assert [getattr(h100, name) for name in same] == [getattr(H100, name) for name in same]
    assert (a10.capability, a10.multiprocessors) == ((8, 6), 72) and a10.bandwidth_gbps == 600
    assert a10.properties().shared_memory_per_block_optin < h100.properties().shared_memory_per_block_optin


@pytest.mark.parametrize("missing", ["g++", "triton"])
def test_without_a_compiler_or_triton_the_forecast_is_a_labelled_estimate(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if missing == "g++" else name)
    monkeypatch.setattr(hooks.importlib.util, "find_spec", lambda name: None)
    found = forecast(ATTENTION, H100_SXM, with_max_batch=False)
    assert found.facts == "estimated" and found.why.startswith(("g++", "the package triton")) and missing in found.why
    assert "install g++ and the package triton" in found.why and "ESTIMATE" in found.facts_text
    data = json.loads(found.to_json())
    assert data["facts"] == "estimated" and data["why"] == found.why and data["observed_peak_bytes"] is None
    assert any(found.facts_text == text for _, text in found.figures().facts)
    frontier = forecast_frontier(ATTENTION, H100_SXM, 3)
    assert frontier.facts == "estimated" and frontier.why == found.why
    assert all(point.observed_peak_bytes is None for point in frontier.points)


@pytest.mark.parametrize(("module", "text"), [("this", "status"), ("no_such_module", "No module named no_such_module")])
def test_a_process_that_fails_leaves_an_estimate(
    module: str, text: str, there: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "MODULE", module)
    found = forecast(ATTENTION, H100_SXM, with_max_batch=False)
    assert found.facts == "estimated" and text in found.why
    assert found.peak_bytes == forecast(ATTENTION, replace(H100_SXM, estimate=True), with_max_batch=False).peak_bytes


def test_the_process_ends_with_the_forecast(there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(KeyboardInterrupt), lowered_for(H100_SXM):
        raise KeyboardInterrupt
    assert started[0].poll() is not None


def test_a_builder_that_no_other_process_can_have_is_said(there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "MODULE", "this")
    with lowered_for(H100_SXM) as lowering:
        lowering.begin(Asked(Builder(lambda: None), H100_SXM, H100_SXM.budget))
        reason = lowering.result()
    assert isinstance(reason, NotObserved) and "pkg.module:build" in reason.remedy


def test_every_known_capability_has_limits() -> None:
    device = FakeDevice("x", (8, 9), 1 << 30, 10, 1 << 20, 1.0, 1.0, 1.0)
    assert device.has_bfloat16 and device.properties().max_threads_per_multi_processor == 1536
    assert not replace(device, capability=(7, 5)).has_bfloat16
