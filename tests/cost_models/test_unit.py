"""The unit model counts kernels."""

from typing import Any

import pytest

from compile_remat.cost_models import CostModel, Op, OpKind, UnitCost

FREE = (OpKind.INPUT, OpKind.CONSTANT, OpKind.VIEW, OpKind.ITEM, OpKind.SYMBOL)


def an_op(kind: OpKind, **changes: Any) -> Op:
    figures = {"dtype": "float32", "flops": 10**9, "read_bytes": 10**6, "write_bytes": 10**6}
    return Op(name="n", target="t", kind=kind, is_random=False, estimated=False, **(figures | changes))


@pytest.mark.parametrize("kind", list(OpKind))
def test_one_for_each_kernel_whatever_its_size(kind: OpKind) -> None:
    model: CostModel = UnitCost()
    assert model.op_time_ns(an_op(kind)) == model.arithmetic_time_ns(an_op(kind)) == (0 if kind in FREE else 1)


def test_bytes_and_launches_are_free() -> None:
    model = UnitCost()
    assert (model.traffic_time_ns(10**12), model.launch_time_ns, model.cache_bytes) == (0, 0, 0)
