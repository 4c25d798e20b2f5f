"""One model on several devices."""

from __future__ import annotations

import pytest

import compile_remat
from compile_remat.cost_models import Device
from compile_remat.errors import ConfigError, DeviceError
from compile_remat.forecast import device_choice
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.device_choice import compare_devices
from compile_remat.forecast.fake_trace import Traced, trace
from compile_remat.forecast.forecasting import forecast
from compile_remat.forecast.target_step import Target

MODEL = "tests.planned_models:convolution"


def test_each_row_is_the_forecast_for_that_device_and_devices_of_a_kind_share_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced: list[tuple[int | None, str]] = []

    def counted(builder: Builder, device: Device) -> Traced:
        traced.append((builder.batch, device.name))
        return trace(builder, device)

    monkeypatch.setattr(device_choice, "trace", counted)
    builder, lines = Builder(MODEL), list[str]()

    def advance(text: str = "", count: int = 1) -> None:
        lines.append(text)

    targets = [Target(name, estimate=True) for name in ("h100-sxm", "a100-80gb", "t4")]
    rows = compare_devices(builder, targets, advance)
    assert traced == [(2, "h100-sxm"), (4, "h100-sxm"), (2, "t4"), (4, "t4")]
    said = [line.partition(" (about")[0] for line in lines if line.startswith("planning")]
    assert said == [f"planning for {t.device}, {k} of 3" for k, t in enumerate(targets, 1)]
    for row, target in zip(rows, targets, strict=True):
        alone = forecast(builder, target)
        assert (row.device, row.limit_bytes, row.total_bytes) == (alone.device, alone.limit_bytes, alone.total_bytes)
        assert row.plan.saved == alone.plan.saved and row.largest == alone.largest_batch and row.fits is True
        assert row.largest is not None and row.largest.plan is not None and row.largest.batch
        assert row.samples_per_s == row.largest.batch * 1e9 / row.largest.plan.time_ns
        assert row.seq is None and row.tokens_per_s is None
    assert rows[0].largest.batch > rows[2].largest.batch  # type: ignore[union-attr, operator]


def test_tokens_are_samples_times_their_length() -> None:
    (row,) = compare_devices(Builder("tests.planned_models:attention", seq=16), [Target("h100-sxm")])
    assert row.samples_per_s is not None and row.tokens_per_s == 16 * row.samples_per_s


def test_a_device_that_is_not_known_is_said_before_anything_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "trace", lambda *given: pytest.fail("traced"))
    with pytest.raises(DeviceError, match="no such device"):
        compare_devices(Builder(MODEL), [Target("h100-sxm"), Target("h101")])


def test_the_largest_batch_is_that_of_the_forecast() -> None:
    found = compile_remat.largest_batch(MODEL, device="t4", optimizer_state="adamw")
    assert found == forecast(Builder(MODEL), Target("t4", estimate=True)).largest_batch
    with pytest.raises(ConfigError, match="takes none"):
        compile_remat.largest_batch("tests.planned_models:broken", device="t4")
    with pytest.raises(ConfigError, match="capacity is not known"):
        compile_remat.largest_batch(MODEL, device="cpu")
