"""Buffers that values behind the forward keep alive, on problems that can be followed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from compile_remat.passes.memory.forward_epilogue import Source, epilogue_sources
from compile_remat.passes.problem.problem import EXTERN, ITEM, POINTWISE, RECOMPUTE, Value


def product(name: str, *reads: int) -> Value:
    return Value(name, 4, EXTERN, reads, 1)


def behind(name: str, *reads: int, nbytes: int = 4, pin: str = "free") -> Value:
    return Value(name, nbytes, POINTWISE, reads, 1, in_forward=False, pin=pin)


def sources(*values: Value) -> list[Source]:
    return epilogue_sources(values, np.array([v.kernel == EXTERN for v in values]))


def test_the_last_reader_of_its_size_is_written_over_it() -> None:
    assert sources(product("a"), behind("mask", 0, nbytes=1), behind("slope", 0)) == [Source(0, (1, 2), True)]
    assert sources(product("a"), behind("slope", 0), behind("mask", 0, nbytes=1)) == [Source(0, (1, 2), False)]


def test_a_value_may_be_written_over_any_buffer_of_its_size() -> None:
    """The saved values decide which buffer is reused."""
    assert sources(product("a"), product("b"), behind("slope", 0, 1)) == [Source(0, (2,), True), Source(1, (2,), True)]


def test_buffers_are_found_through_what_stays_in_registers() -> None:
    inside = Value("scaled", 4, POINTWISE, (0,), 1)
    assert sources(product("a"), inside, behind("half", 1, nbytes=2), behind("slope", 2)) == [Source(0, (2, 3), True)]


def test_nothing_waits_for_what_is_never_saved_or_for_an_output() -> None:
    assert sources(product("a"), behind("mask", 0, pin=RECOMPUTE)) == []
    output = Value("a", 4, EXTERN, (), 1, is_output=True)
    assert sources(output, behind("mask", 0)) == []


def test_a_poolings_offsets_are_written_with_what_it_gives() -> None:
    """The forward reads the first output of the pooling, the backward the second."""
    pooling, pooled = Value("pooling", 0, POINTWISE, (0,), 1), Value("pooled", 2, ITEM, (1,), 1)
    offsets = Value("offsets", 1, ITEM, (1,), 1, in_forward=False)
    assert sources(product("a"), pooling, pooled, offsets) == []
    again = replace(pooling, in_forward=False)
    assert sources(product("a"), again, replace(offsets, reads=(1,))) == [Source(0, (2,), False)]


def test_what_was_concatenated_is_read_there_by_what_stands_behind() -> None:
    """A pooling is written nowhere but into a concatenation: what is behind reads it there, what stands before it does not."""
    pooled = Value("pooled", 2, POINTWISE, (0,), 1)
    before = Value("centred", 2, POINTWISE, (1,), 1)
    both = Value("both", 8, EXTERN, (1,), 1, parts=(1,))
    late = [behind("difference", 1, nbytes=2), behind("product", 2, nbytes=2)]
    assert sources(product("a"), pooled, before, both, *late) == [Source(0, (5,), False), Source(3, (4,), False)]
