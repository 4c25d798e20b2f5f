"""Roofline prices, by hand on a device with round figures."""

import itertools
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from compile_remat.cost_models import (
    CostModel,
    Device,
    Op,
    OpKind,
    Roofline,
    UnitCost,
    device_names,
    load_device,
    make_cost_model,
)
from compile_remat.cost_models.operators.kinds import RUNS_NO_KERNEL
from compile_remat.cost_models.registry import share_spared_by_tf32, tf32_kinds
from compile_remat.cost_models.roofline import wave_fraction
from compile_remat.errors import ConfigError

# 1000 operations and 10 bytes a nanosecond, twice that in bfloat16, half of either where the efficiency says so.
ROUND = Device(
    "round",
    memory_bytes=2**30,
    bandwidth_bytes_per_s=10 * 10**9,
    flops_per_s=(("bfloat16", 2 * 10**12), ("float32", 10**12), ("tf32", 4 * 10**12)),
    launch_ns=100,
    efficiency=(("attention", 0.5),),
)


def an_op(kind: OpKind = OpKind.MATMUL, **changes: Any) -> Op:
    figures = {"target": "t", "dtype": "float32", "flops": 0, "read_bytes": 0, "write_bytes": 0}
    return Op(name="n", kind=kind, is_random=False, estimated=False, **(figures | changes))


@pytest.fixture
def model() -> CostModel:
    return Roofline(ROUND)


def test_arithmetic_or_traffic_whichever_is_longer(model: CostModel) -> None:
    assert model.op_time_ns(an_op(flops=50_000, read_bytes=100)) == 100 + 50
    assert model.op_time_ns(an_op(flops=50_000, read_bytes=600, write_bytes=400)) == 100 + 100


def test_rates_by_type_and_kind(model: CostModel) -> None:
    assert model.arithmetic_time_ns(an_op(flops=10_000)) == 10
    assert model.arithmetic_time_ns(an_op(flops=10_000, dtype="bfloat16")) == 5
    assert model.arithmetic_time_ns(an_op(OpKind.ATTENTION, flops=10_000)) == 20
    # Not stated: float16 runs as float32. Pointwise arithmetic is float32 in any case.
    assert model.arithmetic_time_ns(an_op(flops=10_000, dtype="float16")) == 10
    assert model.arithmetic_time_ns(an_op(OpKind.POINTWISE, flops=10_000, dtype="bfloat16")) == 10


def test_a_sustained_clock_slows_arithmetic_alone() -> None:
    steady = Roofline(replace(ROUND, sustained_clock_ratio=0.8))
    assert steady.op_time_ns(an_op(flops=40_000, read_bytes=100)) == 100 + 50
    assert steady.op_time_ns(an_op(flops=40_000, read_bytes=1000)) == 100 + 100
    assert steady.arithmetic_time_ns(an_op(OpKind.POINTWISE, flops=8_000)) == 10


def test_tf32_only_for_the_kinds_that_may_use_it(model: CostModel) -> None:
    assert model.arithmetic_time_ns(an_op(OpKind.CONV, flops=8_000)) == 2
    assert model.arithmetic_time_ns(an_op(OpKind.MATMUL, flops=8_000)) == 8
    fast = Roofline(ROUND, tf32_kinds=(OpKind.MATMUL,))
    assert fast.arithmetic_time_ns(an_op(OpKind.MATMUL, flops=8_000)) == 2
    assert fast != model


def test_no_work_is_free_but_no_operator_that_runs_nothing_costs(model: CostModel) -> None:
    assert model.arithmetic_time_ns(an_op(flops=1)) == 1
    assert model.traffic_time_ns(1) == 1
    assert model.traffic_time_ns(0) == 0
    for kind in (OpKind.INPUT, OpKind.CONSTANT, OpKind.VIEW, OpKind.ITEM, OpKind.SYMBOL):
        assert model.op_time_ns(an_op(kind, write_bytes=10**6)) == 0


# -- sizes ------------------------------------------------------------------------------------------------------------


def product(m: int, n: int, k: int, batch: int = 1, dtype: str = "bfloat16", **changes: Any) -> Op:
    size = torch.bfloat16.itemsize
    counts = {
        "flops": 2 * batch * m * n * k,
        "read_bytes": size * batch * (m * k + k * n),
        "write_bytes": size * batch * m * n,
        "product": (batch, m, n, k),
    }
    return an_op(dtype=dtype, **(counts | changes))


def test_each_length_halves_the_rate_where_it_is_as_long_as_the_figure() -> None:
    halves = Roofline(replace(ROUND, half_sizes=(("matmul", (100.0, 50.0, 10.0)),)))
    plain = Roofline(replace(ROUND, half_sizes=()))
    op = product(100, 50, 10)
    assert halves.arithmetic_time_ns(op) == pytest.approx(8 * plain.arithmetic_time_ns(op), rel=0.01)
    large = product(100_000, 50_000, 10_000)
    assert halves.arithmetic_time_ns(large) == pytest.approx(plain.arithmetic_time_ns(large), rel=0.01)


def test_an_operator_of_its_own_figures_does_not_take_those_of_its_kind() -> None:
    device = replace(
        ROUND,
        efficiency=(("aten.addmm", 0.25), ("matmul", 0.5)),
        half_sizes=(("aten.addmm", (0.0, 0.0, 0.0)), ("matmul", (9.0, 9.0, 9.0))),
        launches_ns=(("aten.addmm", 7), ("matmul", 70)),
    )
    model = Roofline(device)
    assert model.op_time_ns(product(1000, 1000, 1000, target="aten.addmm.default")) == 7 + 4_000_000
    assert model.op_time_ns(product(1000, 1000, 1000, target="aten.mm.default")) > 70 + 2_000_000
    assert model.op_time_ns(an_op(OpKind.CONV)) == ROUND.launch_ns


def test_a_convolution_of_one_channel_a_group_runs_at_a_part_of_the_float32_rate() -> None:
    device = replace(load_device("h100-sxm"), sustained_clock_ratio=1.0)
    device = replace(device, efficiency=(("conv", 0.5), ("depthwise", 0.2), ("depthwise_backward", 0.1)))
    model = Roofline(device)
    op = product(1 << 14, 1, 49, batch=64, kind=OpKind.CONV, target="aten.convolution.default")
    assert model.arithmetic_time_ns(op) == pytest.approx(op.flops / (0.2 * device.rate("float32")) * 1e9, abs=1)
    back = replace(op, target="aten.convolution_backward.default")
    assert model.arithmetic_time_ns(back) == pytest.approx(op.flops / (0.1 * device.rate("float32")) * 1e9, abs=1)
    for other in (replace(op, product=(1, 1 << 14, 1, 49)), replace(op, product=(64, 1 << 14, 2, 49))):
        assert model.arithmetic_time_ns(other) != model.arithmetic_time_ns(op)  # one group, or two channels: a product
    silent = Roofline(replace(device, efficiency=(("conv", 0.5),)))
    assert silent.arithmetic_time_ns(op) == silent.arithmetic_time_ns(back)


@pytest.mark.parametrize("name", ["h100-sxm", "a100-80gb", "t4", "mi300x", "cpu"])
def test_more_work_never_takes_less_time(name: str) -> None:
    """In each length alone, over the edges of tiles and waves; a hair of slack for the change to smaller tiles."""
    model = Roofline(load_device(name))
    for place in range(3):
        lengths = [1024, 1024, 1024]
        times = []
        for length in (1, 8, 16, 64, 100, 128, 129, 500, 1024, 2048, 3000, 8192, 32768):
            lengths[place] = length
            times.append(model.op_time_ns(product(*lengths)))
        assert all(later >= 0.999 * earlier for earlier, later in itertools.pairwise(times)), (place, times)


@pytest.mark.parametrize("name", ["h100-sxm", "h200", "a100-80gb", "l4", "mi300x"])
def test_small_and_skinny_products_reach_little_of_the_rate(name: str) -> None:
    device = load_device(name)
    model = Roofline(device)

    def reached(op: Op) -> float:
        return op.flops / (model.op_time_ns(op) * 1e-9) / device.rate("bfloat16")

    large, small, skinny = product(8192, 8192, 8192), product(256, 256, 256), product(8, 8192, 8192)
    assert 0.7 < reached(large) <= 0.85, "products of a GPT took 0.75 on an H200 without a pause"
    assert reached(small) < 0.2
    traffic_ns = model.traffic_time_ns(skinny.read_bytes + skinny.write_bytes)
    assert traffic_ns <= model.op_time_ns(skinny) <= 2 * traffic_ns, "bound by the bandwidth, or nearly so"


def test_a_wave_more_costs_a_wave() -> None:
    """132 tiles of 128 x 128 are one wave of 132 multiprocessors; a row of tiles more makes it two."""
    assert wave_fraction((132, 128, 128, 128), 132) == 1.0
    assert wave_fraction((133, 128, 128, 128), 132) == pytest.approx(0.75 * 4 * 133 / (5 * 132), rel=0.05)
    assert wave_fraction((1, 128, 128, 128), 132) < 0.05
    assert wave_fraction((1, 128, 128, 128 * 256), 132) > 0.5, "several share one tile where k is long"


def test_what_the_cache_holds_is_read_faster() -> None:
    device = replace(ROUND, l2_bytes=1000, l2_bandwidth_bytes_per_s=100 * 10**9)
    model = Roofline(device)
    assert model.cache_bytes == 1000
    assert model.traffic_time_ns(1000) == 100
    assert model.traffic_time_ns(1000, cached_bytes=500) == 50 + 5
    assert model.traffic_time_ns(1000, cached_bytes=9999) == 10
    assert Roofline(ROUND).traffic_time_ns(1000, cached_bytes=1000) == 100
    assert Roofline(replace(ROUND, l2_bytes=1000)).cache_bytes == 0


def test_a_scatter_is_priced_by_the_part_of_the_bandwidth_that_it_reaches() -> None:
    device = replace(ROUND, efficiency=(("aten.index_put", 0.25),))
    op = an_op(OpKind.OTHER, target="aten.index_put.default", read_bytes=600, write_bytes=400)
    assert Roofline(device).op_time_ns(op) == 100 + 400
    assert Roofline(ROUND).op_time_ns(op) == 100 + 100


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize("kind", sorted(set(OpKind) - RUNS_NO_KERNEL))
def test_what_nobody_knows_is_never_free(name: str, kind: OpKind) -> None:
    """No operations, no lengths: a launch and the bytes remain."""
    unknown = an_op(kind, target="mine.custom.default", read_bytes=10**6, write_bytes=10**6)
    model = Roofline(load_device(name))
    assert model.op_time_ns(unknown) >= model.launch_time_ns + model.traffic_time_ns(2 * 10**6) > 0


def test_a_price_is_quick_to_find() -> None:
    """Counted, not timed: the figures are put into tables once for each model."""
    model = Roofline(load_device("h100-sxm"))
    model.op_time_ns(product(64, 64, 64))
    assert model._half_sizes is model._half_sizes
    assert model._efficiency is model._efficiency


def test_a_model_is_a_picklable_value(model: CostModel) -> None:
    again = pickle.loads(pickle.dumps(model))
    assert again == model


def test_large_products_on_known_devices_take_plausible_times() -> None:
    """An 8192-cube in bfloat16 is 1.1e12 operations: 1.5 ms at 0.73 of an H100's dense rate, and a little for a last wave."""
    op = an_op(flops=2 * 8192**3, dtype="bfloat16", read_bytes=2 * 2 * 8192**2, write_bytes=2 * 8192**2)
    assert Roofline(load_device("h100-sxm")).op_time_ns(op) == pytest.approx(1.51e6, rel=0.03)
    assert Roofline(load_device("t4")).op_time_ns(op) > 100 * Roofline(load_device("h100-sxm")).op_time_ns(op)


def test_make_cost_model() -> None:
    assert isinstance(make_cost_model("unit", ROUND), UnitCost)
    assert make_cost_model("roofline", ROUND) == Roofline(ROUND, tf32_kinds())
    with pytest.raises(ConfigError, match=r'"roofine".*Did you mean "roofline"'):
        make_cost_model("roofine", ROUND)


def test_tf32_follows_torchs_settings() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert OpKind.MATMUL not in tf32_kinds()
        torch.set_float32_matmul_precision("high")
        assert OpKind.MATMUL in tf32_kinds()
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_share_that_tf32_would_spare_follows_torchs_settings_and_the_device() -> None:
    ops = [
        an_op(flops=8_000_000),
        an_op(OpKind.POINTWISE, flops=1_900_000),
    ]  # 8000 and 1900 ns, and two launches of 100
    half = [an_op(flops=8_000_000, dtype="bfloat16")]
    without = replace(ROUND, flops_per_s=(("float32", 10**12),))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert share_spared_by_tf32(ops, ROUND) == pytest.approx(6_000 / 10_100)  # a product takes 2000 ns in TF32
        assert (
            share_spared_by_tf32(half, ROUND)
            == share_spared_by_tf32(ops, without)
            == share_spared_by_tf32((), ROUND)
            == 0
        )
        torch.set_float32_matmul_precision("high")
        assert share_spared_by_tf32(ops, ROUND) == 0
    finally:
        torch.set_float32_matmul_precision(before)
