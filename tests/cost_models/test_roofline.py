"""Roofline prices, by hand on a device with round figures."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from compile_remat.cost_models import CostModel, Device, Op, OpKind, Roofline, UnitCost, load_device, make_cost_model
from compile_remat.cost_models.factory import tf32_kinds
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
    figures = {"dtype": "float32", "flops": 0, "read_bytes": 0, "write_bytes": 0}
    return Op(name="n", target="t", kind=kind, is_random=False, estimated=False, **(figures | changes))


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


def test_tf32_only_for_the_kinds_that_may_use_it(model: CostModel) -> None:
    assert model.arithmetic_time_ns(an_op(OpKind.CONV, flops=8_000)) == 2
    assert model.arithmetic_time_ns(an_op(OpKind.MATMUL, flops=8_000)) == 8
    fast = Roofline(ROUND, tf32_kinds=(OpKind.MATMUL,))
    assert fast.arithmetic_time_ns(an_op(OpKind.MATMUL, flops=8_000)) == 2
    assert fast.key() != model.key()


def test_no_work_is_free_but_no_operator_that_runs_nothing_costs(model: CostModel) -> None:
    assert model.arithmetic_time_ns(an_op(flops=1)) == 1
    assert model.traffic_time_ns(1) == 1
    assert model.traffic_time_ns(0) == 0
    for kind in (OpKind.INPUT, OpKind.CONSTANT, OpKind.VIEW, OpKind.ITEM, OpKind.SYMBOL):
        assert model.op_time_ns(an_op(kind, write_bytes=10**6)) == 0


def test_fused_group_pays_one_launch_and_its_own_traffic_once(model: CostModel) -> None:
    chain = [an_op(OpKind.POINTWISE, flops=1_000, read_bytes=1_000, write_bytes=1_000) for _ in range(5)]
    assert sum(model.op_time_ns(op) for op in chain) == 5 * 300
    assert model.group_time_ns(chain, read_bytes=1_000, write_bytes=1_000) == 100 + 200
    assert model.group_time_ns(chain, read_bytes=10, write_bytes=10) == 100 + 5
    assert model.group_time_ns([an_op(OpKind.VIEW)], read_bytes=10, write_bytes=10) == 0
    assert model.group_time_ns([], read_bytes=10, write_bytes=10) == 0


def test_key_changes_with_every_figure_that_changes_a_price(model: CostModel) -> None:
    changes = [
        {"bandwidth_bytes_per_s": 1},
        {"flops_per_s": (("float32", 1),)},
        {"launch_ns": 1},
        {"efficiency": (("attention", 0.6),)},
    ]
    keys = {Roofline(replace(ROUND, **change)).key() for change in changes}
    assert len(keys | {model.key()}) == len(changes) + 1
    assert Roofline(replace(ROUND, name="other", memory_bytes=None)).key() == model.key()


def test_a_model_is_a_picklable_value(model: CostModel) -> None:
    again = pickle.loads(pickle.dumps(model))
    assert again == model
    assert again.key() == model.key()


def test_large_products_on_known_devices_take_plausible_times() -> None:
    """An 8192-cube in bfloat16 is 1.1e15 operations: 1.6 ms at 0.7 of an H100's dense rate."""
    op = an_op(flops=2 * 8192**3, dtype="bfloat16", read_bytes=2 * 2 * 8192**2, write_bytes=2 * 8192**2)
    assert Roofline(load_device("h100-sxm")).op_time_ns(op) == pytest.approx(1.59e6, rel=0.01)
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
