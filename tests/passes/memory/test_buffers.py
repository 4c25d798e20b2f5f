"""Which of the values that a kernel reads it may write over."""

import numpy as np
import pytest

from compile_remat.passes.memory.buffers import own_reads, register_path
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, Value


@pytest.mark.parametrize(
    ("inlined_if", "expected"),
    [((), ["product", "x", "sigmoid"]), ((1,), ["product", "sigmoid"])],
    ids=["a node of its own", "computed by both of its readers"],
)
def test_what_two_nodes_of_a_kernel_read_is_not_written_over(inlined_if: tuple[int, ...], expected: list[str]) -> None:
    """`sum` reads x, `sigmoid` reads `sum`, `silu` reads both: where x is saved, `sum` may be no node of its own any more."""
    values = [
        Value("product", 8, EXTERN, (), 1),
        Value("x", 8, POINTWISE, (0,), 1),
        Value("sum", 8, POINTWISE, (1,), 1, realised=True, is_inner=True, inlined_if=inlined_if),
        Value("sigmoid", 8, POINTWISE, (2,), 1, realised=True, is_inner=True),
        Value("silu", 8, POINTWISE, (2, 3), 1),
        Value("product of silu", 8, EXTERN, (4,), 1),
    ]
    stored = np.array([v.kernel == EXTERN for v in values])
    path = register_path(own_reads(values[4]), values, stored, values[4])
    assert [values[v].name for v in path] == expected


def test_nothing_is_handed_on_through_a_node_of_other_bytes() -> None:
    """`half` has half the bytes of `x` and of `wide`: what `same` reads behind it is not memory that `wide` may be written to."""
    values = [
        Value("x", 8, POINTWISE, (), 1),
        Value("same", 8, POINTWISE, (0,), 1, realised=True, is_inner=True),
        Value("half", 4, POINTWISE, (1,), 1, realised=True, is_inner=True),
        Value("wide", 8, POINTWISE, (2,), 1),
    ]
    assert register_path(own_reads(values[3]), values, np.zeros(4, dtype=bool), values[3]) == [2]
