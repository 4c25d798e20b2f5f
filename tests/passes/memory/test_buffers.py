"""The values read by a kernel whose buffers it may reuse for its output."""

from compile_remat.passes.memory.buffers import register_gradients, register_path, register_reads
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, Step, Value


def test_the_path_of_a_value_goes_through_what_stays_in_registers() -> None:
    values = [
        Value("product", 8, EXTERN, (), 1),
        Value("other", 8, EXTERN, (0,), 1),
        Value("square", 8, POINTWISE, (1, 1), 1),
        Value("sum", 8, POINTWISE, (2,), 1),
    ]
    paths = [register_path(value.reads, values, [True, True, False, False]) for value in values]
    assert paths == [[], [0], [1], [1, 2]]
    assert register_path((2,), values, [True, True, True, False]) == [2]


def test_the_path_of_a_step_goes_through_steps_that_stay_in_registers() -> None:
    values = [Value("saved", 8, EXTERN, (), 1)]
    steps = [
        Step("product", 8, EXTERN, (), ()),
        Step("other", 8, EXTERN, (), ()),
        Step("scaled", 8, POINTWISE, (0,), (0,)),
        Step("sum", 8, POINTWISE, (), (1, 2)),
        Step("both", 8, POINTWISE, (), (0, 2)),
    ]
    stored = [True, True, False, False, False]
    assert [register_gradients(b, steps, stored) for b in range(5)] == [[], [], [0], [1, 0], [0]]
    paths = [register_path(register_reads(b, steps, stored), values, [True]) for b in range(5)]
    assert paths == [[], [], [0], [0], [0]]
    stored[2] = True
    assert register_gradients(3, steps, stored) == [1, 2] and register_reads(3, steps, stored) == []
