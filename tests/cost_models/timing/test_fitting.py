"""Least squares find the figures that the measured times were made from."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compile_remat.cost_models import Op, OpKind
from compile_remat.cost_models.device.files import device_from_json, device_to_json
from compile_remat.cost_models.device.table import device_names, load_device
from compile_remat.cost_models.timing.fitting import Path, Point, fit, model_of

PLANTED: dict[str, Any] = {
    "bandwidth_bytes_per_s": 20_000_000_000,
    "flops_per_s": {"float32": 150_000_000_000},
    "launch_ns": 3_000,
    "efficiency": {"aten.exp": 0.2},
    "half_sizes": {"matmul": [40.0, 25.0, 60.0]},
    "launches_ns": {"matmul": 2_000},
}
START: dict[str, Any] = {
    "bandwidth_bytes_per_s": 50_000_000_000,
    "flops_per_s": {"float32": 1_000_000_000_000},
    "launch_ns": 100,
    "efficiency": {"aten.exp": 1.0},
    "half_sizes": {"matmul": [8.0, 8.0, 16.0]},
    "launches_ns": {"matmul": 2_000},
}


def product(m: int, n: int, k: int) -> Op:
    nbytes = 4 * (m * k + k * n)
    return Op(
        "mm", "aten.mm.default", OpKind.MATMUL, "float32", 2 * m * n * k, nbytes, 4 * m * n, False, False, (1, m, n, k)
    )


def points(noise: float = 0.0) -> list[Point]:
    truth = model_of(PLANTED)
    draw = np.random.default_rng(0)
    found = []
    for m, n, k in [(2048, 256, 256), (256, 256, 2048), (1024, 1024, 1024), (128, 128, 128), (32, 1024, 1024),
                    (1024, 1024, 32), (4096, 64, 64), (64, 2048, 256)]:  # fmt: skip
        op = product(m, n, k)
        measured = truth.op_time_ns(op) * float(np.exp(noise * draw.standard_normal()))
        found.append(Point(f"{m}x{n}x{k}", measured, lambda model, op=op: model.op_time_ns(op)))  # type: ignore[misc]
    return found


PATHS: list[Path] = [("flops_per_s", "float32"), *[("half_sizes", "matmul", place) for place in range(3)]]


def test_planted_figures_of_products_are_found() -> None:
    start = START | {"bandwidth_bytes_per_s": PLANTED["bandwidth_bytes_per_s"]}
    found = fit(start, PATHS, points())
    assert found["flops_per_s"]["float32"] == pytest.approx(150e9, rel=0.02)
    assert found["half_sizes"]["matmul"] == pytest.approx([40, 25, 60], rel=0.1)
    assert all(abs(point.error(model_of(found))) < 0.01 for point in points())


def test_noise_moves_prices_no_further_than_itself() -> None:
    start = START | {"bandwidth_bytes_per_s": PLANTED["bandwidth_bytes_per_s"]}
    found = fit(start, PATHS, points(noise=0.05))
    assert all(abs(point.error(model_of(found))) < 0.1 for point in points())


def test_one_disturbed_point_does_not_carry_the_others_away() -> None:
    start = START | {"bandwidth_bytes_per_s": PLANTED["bandwidth_bytes_per_s"]}
    clean = points()
    disturbed = [replace(clean[0], measured_ns=5 * clean[0].measured_ns), *clean[1:]]
    model = model_of(fit(start, PATHS, disturbed))
    assert np.median([abs(point.error(model)) for point in clean]) < 0.1


def test_bandwidth_and_launch_are_told_apart() -> None:
    truth = model_of(PLANTED)

    def at(nbytes: int) -> Point:
        measured = truth.launch_time_ns + truth.traffic_time_ns(nbytes)
        return Point(str(nbytes), measured, lambda model: model.launch_time_ns + model.traffic_time_ns(nbytes))

    found = fit(START, [("bandwidth_bytes_per_s",), ("launch_ns",)], [at(1 << n) for n in range(12, 26, 2)])
    assert found["bandwidth_bytes_per_s"] == pytest.approx(20e9, rel=0.01)
    assert found["launch_ns"] == pytest.approx(3_000, rel=0.02)


def test_a_figure_of_exactly_one_moves() -> None:
    """The logarithm of 1 is 0, so steps in proportion to the logarithm would be zero."""
    op = Op("exp", "aten.exp.default", OpKind.POINTWISE, "float32", 10**6, 0, 0, False, False)
    measured = model_of(PLANTED).arithmetic_time_ns(op) / 1
    start = START | {"flops_per_s": PLANTED["flops_per_s"]}
    found = fit(
        start, [("efficiency", "aten.exp")], [Point("exp", measured, lambda model: model.arithmetic_time_ns(op))]
    )
    assert found["efficiency"]["aten.exp"] == pytest.approx(0.2, rel=0.01)


def test_nothing_measured_changes_nothing() -> None:
    assert fit(START, PATHS, []) == START


@pytest.mark.parametrize("name", device_names())
def test_a_device_survives_being_written_and_read(name: str) -> None:
    device = load_device(name)
    assert device_from_json("another", device_to_json(device), "a test") == device


def test_arithmetic_that_starts_behind_the_traffic_is_found() -> None:
    """At the start the kernel waits for memory, whatever its arithmetic: there is no slope to follow (random numbers, an H200)."""
    op = Op("rand", "aten.exp.default", OpKind.POINTWISE, "float32", 10**9, 4 * 10**6, 4 * 10**6, False, False)
    content = PLANTED | {"efficiency": {"aten.exp": 0.01}}
    measured = model_of(content).arithmetic_time_ns(op)
    point = Point(
        "rand", measured, lambda model: float(max(model.arithmetic_time_ns(op), model.traffic_time_ns(8 * 10**6)))
    )
    start = PLANTED | {"efficiency": {"aten.exp": 100.0}}
    assert point.error(model_of(start)) < -0.9
    found = fit(start, [("efficiency", "aten.exp")], [point])
    assert found["efficiency"]["aten.exp"] == pytest.approx(0.01, rel=0.02)


def test_an_efficiency_may_have_an_upper_limit() -> None:
    op = replace(product(256, 256, 256), kind=OpKind.CONV, target="aten.convolution.default")
    point = Point(
        "conv", model_of(PLANTED | {"efficiency": {"conv": 3.0}}).op_time_ns(op), lambda model: model.op_time_ns(op)
    )
    start = PLANTED | {"efficiency": {"conv": 0.7}}
    assert fit(start, [("efficiency", "conv")], [point])["efficiency"]["conv"] == pytest.approx(3.0, rel=0.02)
    most = {("efficiency", "conv"): 1.0}
    assert fit(start, [("efficiency", "conv")], [point], most)["efficiency"]["conv"] == pytest.approx(1.0)


def test_no_rate_is_fitted_above_the_data_sheet() -> None:
    """Sizes of which all run fast leave the rate of large ones open; on an H200 it came out 7 % above the data sheet."""
    start, most = START | {"flops_per_s": {"float32": 120e9}}, {("flops_per_s", "float32"): 120e9}
    start |= {"bandwidth_bytes_per_s": PLANTED["bandwidth_bytes_per_s"]}
    found = fit(start, PATHS, points(), most)
    assert 119.9e9 < found["flops_per_s"]["float32"] <= 120e9
    assert fit(start, PATHS, points())["flops_per_s"]["float32"] == pytest.approx(150e9, rel=0.02)
