"""Bools in bits: what goes in comes out, in every shape and order of memory, as operators and written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from compile_remat._torch.narrowing.bit_ops import PACK_BITS, UNPACK_BITS, expand_bit_ops, num_bytes

SHAPES = [
    ((0,), [0]),
    ((1,), [0]),
    ((511,), [0]),
    ((513,), [0]),
    ((7, 9, 11), [0, 1, 2]),
    ((2, 3, 5, 7), [0, 2, 3, 1]),
    ((64, 32), [1, 0]),
]


def bools(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) > 0


@pytest.mark.parametrize(("shape", "order"), SHAPES)
def test_what_is_packed_comes_back(shape: tuple[int, ...], order: list[int]) -> None:
    value = bools(*shape)
    bits = PACK_BITS(value, order)
    assert bits.dtype is torch.uint8 and bits.shape == (num_bytes(value.numel()),)
    back = UNPACK_BITS(bits, list(shape), order)
    assert back.dtype is torch.bool and torch.equal(back, value)


def test_eight_elements_to_a_byte() -> None:
    assert [num_bytes(n) for n in (0, 1, 512, 513, 1 << 20)] == [0, 64, 64, 128, 1 << 17]
    assert PACK_BITS(torch.ones(1024, dtype=torch.bool), [0]).tolist() == [255] * 128


def test_bits_of_a_byte_are_an_eighth_of_the_tensor_apart() -> None:
    value = torch.zeros(1024, dtype=torch.bool)
    value[3 * 128 + 5] = True
    assert PACK_BITS(value, [0])[5].item() == 1 << 3


@pytest.mark.parametrize(("shape", "order"), SHAPES[1:])
def test_written_out_it_is_the_same(shape: tuple[int, ...], order: list[int]) -> None:
    def both(value: Tensor) -> tuple[Tensor, Tensor]:
        bits = PACK_BITS(value, order)
        return bits, UNPACK_BITS(bits, list(shape), order)

    value = bools(*shape)
    module = make_fx(both, tracing_mode="fake")(value)
    names = [node.name for node in module.graph.nodes if node.target in (PACK_BITS, UNPACK_BITS)]
    expected = both(value)
    expand_bit_ops(module)
    module.graph.lint()
    left = {node.target for node in module.graph.nodes}
    assert not left & {PACK_BITS, UNPACK_BITS}
    assert set(names) <= {node.name for node in module.graph.nodes}  # reports know what is saved by its name
    assert all(torch.equal(a, b) for a, b in zip(module(value), expected, strict=True))
