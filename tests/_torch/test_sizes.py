"""Sizes of tensors with symbolic shapes: at their hints, at others, and at the bounds of those that only the data knows."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext

from compile_remat._torch.sizes import FALLBACK, hint_int, hint_shape, hint_strides, sizes_at, storage_nbytes


@pytest.fixture
def environment() -> ShapeEnv:
    return ShapeEnv()


def fake(environment: ShapeEnv, *shape: int) -> torch.Tensor:
    """A fake tensor all of whose sizes are symbols."""
    dynamic = torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC
    context = StatelessSymbolicContext(dynamic_sizes=[dynamic] * len(shape))
    return FakeTensorMode(shape_env=environment).from_tensor(torch.empty(shape), symbolic_context=context)


def test_sizes_are_those_asked_for_and_no_guard_is_added(environment: ShapeEnv) -> None:
    tensor = fake(environment, 6, 10)
    rows, columns = (str(size) for size in tensor.shape)
    before = len(environment.guards)
    assert hint_shape(tensor) == (6, 10) and storage_nbytes(tensor) == 240
    with sizes_at([(rows, 7), (columns, 100)]):
        assert hint_shape(tensor) == (7, 100) and hint_strides(tensor) == (100, 1)
        assert storage_nbytes(tensor) == 2800
        assert hint_int((tensor.shape[0] * tensor.shape[1] + 5) // 3) == 235
    with sizes_at([(rows, 7)]):
        assert hint_int(tensor.shape[0]) == 7 and hint_int(tensor.shape[1]) == 10
    assert hint_shape(tensor) == (6, 10) and len(environment.guards) == before


def test_sizes_that_only_the_data_knows_count_at_their_bound(environment: ShapeEnv) -> None:
    bounded, unbounded = environment.create_unbacked_symint(), environment.create_unbacked_symint()
    torch._check(bounded >= 0)
    torch._check(bounded <= 300)
    assert hint_int(bounded) == 300 and hint_int(2 * bounded + 1) == 601
    assert hint_int(unbounded) == FALLBACK and hint_int(unbounded, fallback=77) == 77
