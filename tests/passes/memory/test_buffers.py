"""Which of the values that a kernel reads it may write over."""

from compile_remat.passes.memory.buffers import own_path, own_reads, register_gradients, register_path, register_reads
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, Step, Value


def test_what_reads_buffers_alone_has_no_path_to_follow() -> None:
    values = [
        Value("product", 8, EXTERN, (), 1),
        Value("other", 8, EXTERN, (), 1),
        Value("square", 8, POINTWISE, (1, 0, 1), 1),
        Value("sum", 8, POINTWISE, (2, 1), 1),
    ]
    stored = [True, True, False, False]
    for value, path in zip(values[2:], ([0, 1], [0, 1, 2]), strict=True):
        assert own_path(value, values, stored) == register_path(own_reads(value), values, stored) == path


def test_what_is_read_at_other_places_is_not_written_over() -> None:
    """`flipped` reads `product` from its other end, in registers; `sum` reads both products where it computes."""
    values = [
        Value("product", 8, EXTERN, (), 1),
        Value("other", 8, EXTERN, (), 1),
        Value("flipped", 8, POINTWISE, (0,), 1, moved=(0,)),
        Value("sum", 8, POINTWISE, (1, 2), 1),
        Value("both", 8, POINTWISE, (0, 2), 1),
    ]
    stored = [True, True, False, False, False]
    assert [own_path(value, values, stored) for value in values[2:]] == [[], [1, 2], [2]]


def test_gradients_that_are_read_at_other_places_are_not_written_over() -> None:
    values = [Value("saved", 8, EXTERN, (), 1)]
    steps = [
        Step("product", 8, EXTERN, (), ()),
        Step("other", 8, EXTERN, (), ()),
        Step("flipped", 8, POINTWISE, (0,), (0,), moved=(0,), moved_gradients=(0,)),
        Step("sum", 8, POINTWISE, (), (1, 2)),
        Step("both", 8, POINTWISE, (), (0, 2)),
        Step("tail", 8, POINTWISE, (0,), (3,), moved_gradients=(3,)),
    ]
    stored = [True, True, False, False, False, False]
    assert [register_gradients(b, steps, stored) for b in range(2, 6)] == [[], [1], [], []]
    paths = [register_path(register_reads(b, steps, stored), values, [True]) for b in range(2, 6)]
    assert paths == [[], [], [], []]
    assert register_path(register_reads(0, steps, stored), values, [True]) == []
    plain = [Step("product", 8, EXTERN, (), ()), Step("scaled", 8, POINTWISE, (0,), (0,))]
    assert register_path(register_reads(1, plain, [True, False]), values, [True]) == [0]
