"""Live bytes of the forward under a plan, on problems that can be added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, REDUCTION, Problem, Step, Value


def value(name: str, nbytes: int, reads: Sequence[int], kernel: str = EXTERN, *, in_forward: bool = True) -> Value:
    return Value(name, nbytes, kernel, tuple(reads), 1, in_forward=in_forward)


def peak_of(values: Sequence[Value], read: Sequence[int], saved: Sequence[int]) -> int:
    """The forward's peak where the backward is one step that reads these values, and these are saved."""
    steps = (Step("gradient", 0, EXTERN, tuple(read), (), 1), Step("output", 0, "constant", (), (0,)))
    mask = np.zeros((len(values), 1), dtype=bool)
    mask[list(saved)] = True
    return int(Simulator(Problem(tuple(values), steps, 1, ())).run(mask).forward_peak[0])


CHAIN = [value("a", 4, []), value("b", 8, [0]), value("c", 2, [1]), value("d", 1, [2])]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ([], 12),  # a and b
        ([0], 14),  # a stays: with b and c
        ([1], 12),  # b stays; c and d after it are less than a
        ([2], 12),
        ([0, 1], 15),  # a, b, c, d
    ],
)
def test_what_is_saved_stays_to_the_end(saved: list[int], expected: int) -> None:
    assert peak_of(CHAIN, [0, 1, 2, 3], saved) == expected


def test_a_saved_value_cuts_off_what_it_was_computed_from() -> None:
    """In registers, `b` keeps `a` for the kernel that reads it; saved, `b` has a buffer, and `a` dies where that is made."""
    values = [value("a", 8, []), value("b", 4, [0], POINTWISE), value("c", 6, []), value("d", 5, [2])]
    values += [value("e", 3, [1, 3], POINTWISE), value("f", 1, [4])]
    assert peak_of(values, [1], []) == 8 + 6 + 5  # a, c, d
    assert peak_of(values, [1], [1]) == 4 + 6 + 5  # b in the place of a


def test_a_pointwise_kernel_writes_over_what_it_is_the_last_to_read_but_for_what_is_saved() -> None:
    values = [value("a", 4, []), value("b", 4, [0], POINTWISE), value("c", 1, [1])]
    assert peak_of(values, [0, 1], []) == 4 + 1
    assert peak_of(values, [0, 1], [0]) == 4 + 4 + 1


def test_what_is_computed_behind_the_forward_is_written_over_the_first_buffer_that_is_not_saved() -> None:
    """The branches of residual blocks are summed once more for the gradient of the loss; one branch is saved for another kernel."""
    values = [value("a", 4, []), value("b", 4, []), value("loss", 1, [0, 1], REDUCTION)]
    values += [value("slope", 4, [0, 1], POINTWISE, in_forward=False)]
    assert peak_of(values, [0, 3], [3]) == 4 + 4 + 1  # over a
    assert peak_of(values, [0, 3], [0, 3]) == 4 + 4 + 1  # over b
    assert peak_of(values, [0, 1, 3], [0, 1, 3]) == 4 + 4 + 4  # over none


def test_what_is_computed_to_be_saved_keeps_what_it_reads() -> None:
    """The mask of `a` is computed behind the forward: until then `a` stays, which would have died at `b`."""
    values = [
        value("a", 4, []),
        value("b", 8, [0]),
        value("c", 8, [1]),
        value("mask", 1, [0], POINTWISE, in_forward=False),
    ]
    assert peak_of(values, [3], []) == 16
    assert peak_of(values, [3], [3]) == 4 + 16
    assert peak_of(values, [0, 3], [0]) == 4 + 16


def test_what_is_made_of_random_numbers_alone_is_written_where_they_are_drawn() -> None:
    """A dropout's factors for the gradient, half as large as its random numbers: these die with the forward's own reader."""
    drawn = replace(value("drawn", 4, [0], POINTWISE), realised=True)
    values = [
        value("a", 4, []),
        drawn,
        value("dropped", 4, [0, 1], POINTWISE),
        value("b", 8, [2]),
        value("c", 8, [3]),
        value("factors", 2, [1], POINTWISE, in_forward=False),
        value("scaled", 1, [1, 2], POINTWISE, in_forward=False),
    ]
    assert peak_of(values, [5], []) == 16
    assert peak_of(values, [5], [5]) == 2 + 16
    assert peak_of(values, [5, 6], [5, 6]) == 4 + 4 + 16  # a value with more sources waits with all of them
    larger = replace(values[5], nbytes=5)
    assert peak_of([*values[:5], larger], [5], [5]) == 4 + 16


def test_what_is_computed_of_one_pointwise_buffer_is_written_with_it() -> None:
    """The mask of a ReLU that a convolution reads: the ReLU dies there, and its mask was written by its own kernel."""
    values = [
        value("a", 4, []),
        replace(value("relu", 4, [0], POINTWISE), realised=True),
        value("b", 8, [1]),
        value("c", 8, [2]),
        value("mask", 1, [1], POINTWISE, in_forward=False),
    ]
    assert peak_of(values, [4], [4]) == 8 + 8 + 1
    assert peak_of([*values[:4], replace(values[4], nbytes=5)], [4], [4]) == 4 + 8 + 8  # the larger value waits


JOINED = [
    value("a", 4, []),
    replace(value("skip", 4, [0], POINTWISE), realised=True),
    value("b", 8, [1]),
    replace(value("both", 12, [1, 2], POINTWISE), realised=True, parts=(1,)),
    value("c", 1, [3]),
]


def test_a_concatenation_begins_with_a_part_that_something_else_reads_before() -> None:
    assert peak_of(JOINED, [1], []) == 12 + 8  # `skip` lies in it
    assert peak_of(JOINED, [1], [1]) == 4 + 12 + 8  # `skip` is written beside it, and into it


def test_a_part_that_nothing_else_reads_is_computed_where_the_concatenation_stands() -> None:
    values = [*JOINED[:2], replace(JOINED[2], reads=(0,)), *JOINED[3:]]
    assert peak_of(values, [1], []) == 4 + 8 + 12  # its operands live until then


def test_a_concatenation_in_its_readers_order_is_not_copied() -> None:
    """A saved part with its channels innermost tells the order.  A copy is made when the part that was copied into it is freed."""
    copied = replace(JOINED[3], ordered_by=(1,), transient_bytes=12)
    values = [*JOINED[:3], copied, JOINED[4]]
    assert peak_of(values, [1], []) == 12 + 12
    assert peak_of(values, [1], [1]) == 4 + 12 + 8
