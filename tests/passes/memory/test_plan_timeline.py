"""The timeline of one plan, on a chain whose every byte can be added up by hand."""

from dataclasses import replace

import numpy as np
import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat.passes.memory.plan_timeline import Timeline, timeline, timeline_of
from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.plan import Plan, Status
from compile_remat.passes.problem.problem import (
    CONSTANT,
    EXTERN,
    ITEM,
    PREFER_RECOMPUTE,
    RECOMPUTE,
    Origin,
    Problem,
    Step,
    Value,
)
from tests.oracles.random_problems import Shape, problems, seeded_problem
from tests.oracles.slow_walk import slow_run

ORIGIN = Origin((5, 2), "int8", "body", "model.py:3")
WIDE = [("f", 6), ("e", 6), ("d", 7), ("c", 6), ("b", 4), ("a", 5), ("z", 2)]


def chain(gradient_bytes: int = 8) -> Problem:
    """a -> b -> out in the forward; in the backward `g0` reads b, then `g1` reads `g0` and a and is returned."""
    values = (
        Value("a", 10, EXTERN, (), 1, origin=ORIGIN),
        Value("b", 20, EXTERN, (0,), 1, position=1),
        Value("out", 5, EXTERN, (1,), 1, position=2, is_output=True),
    )
    steps = (
        Step("g0", 4, EXTERN, (1,), (), 1),
        Step("g1", gradient_bytes, EXTERN, (0,), (0,), 1, is_output=True),
        Step("output", 0, CONSTANT, (), (1,)),
    )
    return Problem(values, steps, 5)


def plan_saving(*saved: str) -> Plan:
    return Plan("", Status.REPLAYED, None, saved, (), 0, 0, 0, 0, 0, 0, 0)


def report(found: Timeline) -> str:
    rows = [f"{name:<8}{live}" for name, live in zip(found.kernels, found.live_bytes, strict=True)]
    largest = ", ".join(f"{b.name} {b.nbytes} {b.role}" for b in found.largest)
    return "\n".join([*rows, f"forward {found.forward_peak_bytes}, peak {found.peak_bytes}", largest])


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_plan_may_have_set_a_tag_aside() -> None:
    free = chain()
    values = tuple(replace(v, pin=RECOMPUTE, tag=PREFER_RECOMPUTE) if v.name == "b" else v for v in free.values)
    assert timeline(replace(free, values=values), plan_saving("a", "b")) == timeline(free, plan_saving("a", "b"))


def test_a_plan_that_saves_a_tuple_is_refused() -> None:
    values = (
        Value("x", 4, EXTERN, (), 1),
        Value("split", 0, EXTERN, (0,), 1),
        Value("part", 4, ITEM, (1,), 0),
    )
    problem = Problem(values, (Step("g", 4, EXTERN, (2,), ()), Step("output", 0, CONSTANT, (), (0,))))
    with pytest.raises(ValueError, match="cannot be saved"):
        timeline(problem, plan_saving("split"))


def test_one_saved() -> None:
    """b is computed once more in front of its reader; at the peak a 10 + b 20 + out 5 + g0 4."""
    assert_expected_inline(
        report(timeline(chain(), plan_saving("a"))),
        """\
b       35
g0      39
g1      27
output  13
forward 35, peak 39
b 20 recomputed, a 10 saved, out 5 output, g0 4 temporary""",
    )


def test_nothing_saved() -> None:
    """The forward drops a as soon as b is there, the backward makes both again."""
    assert_expected_inline(
        report(timeline(chain(), plan_saving())),
        """\
a       15
b       35
g0      39
g1      27
output  13
forward 30, peak 39
b 20 recomputed, a 10 recomputed, out 5 output, g0 4 temporary""",
    )


def test_a_large_gradient_moves_the_peak() -> None:
    """At g1 live a 10 + out 5 + g0 4 + g1 80."""
    assert_expected_inline(
        report(timeline(chain(gradient_bytes=80), plan_saving("a"))),
        """\
b       35
g0      39
g1      99
output  85
forward 35, peak 99
g1 80 gradient, a 10 saved, out 5 output, g0 4 temporary""",
    )


def test_the_forward_may_be_the_peak() -> None:
    """`wide` dies in the forward: its 90 bytes beside a count in no slot of the backward."""
    a, b, out = chain().values
    values = (a, Value("wide", 90, EXTERN, (0,), 1, position=1), replace(b, reads=(1,)), replace(out, reads=(2,)))
    steps = (replace(chain().steps[0], reads=(2,)), *chain().steps[1:])
    found = timeline(Problem(values, steps), plan_saving("a", "b"))
    assert (found.forward_peak_bytes, found.peak_bytes, max(found.live_bytes)) == (120, 120, 39)


def test_a_saved_value_that_nothing_reads_counts_for_nothing() -> None:
    problem = chain()
    values = (*problem.values, Value("idle", 1000, EXTERN, (), 1, position=3, in_forward=False))
    assert timeline(replace(problem, values=values), plan_saving("a", "idle")) == timeline(problem, plan_saving("a"))


# -- the largest ------------------------------------------------------------------------------------------------------


def test_where_the_largest_come_from() -> None:
    found = timeline(chain(), plan_saving("a"))
    assert found.largest[1] == LiveBuffer("a", 10, (5, 2), "int8", "body", "model.py:3", "saved")


def test_five_largest_and_ties_by_name() -> None:
    values = tuple(Value(name, nbytes, EXTERN, (), 1, position=i) for i, (name, nbytes) in enumerate(WIDE))
    steps = (Step("g", 1, EXTERN, tuple(range(7)), (), 1, is_output=True), Step("output", 0, CONSTANT, (), (0,)))
    problem = Problem(values, steps)
    found = timeline(problem, plan_saving(*(name for name, _ in WIDE)))
    assert [b.name for b in found.largest] == ["d", "c", "e", "f", "a"]
    every = np.ones(7, dtype=bool)
    assert [b.name for b in timeline_of(Simulator(problem), every, keep=2).largest] == ["d", "c"]
    assert sum(b.nbytes for b in timeline_of(Simulator(problem), every, keep=99).largest) == found.peak_bytes == 37


def test_names_the_copy_that_a_kernel_makes_of_what_it_reads() -> None:
    values = (
        Value("a", 30, EXTERN, (), 1),
        Value("b", 10, EXTERN, (0,), 1, position=1, copies=(0,)),
    )
    steps = (
        Step("g", 1, EXTERN, (0, 1), (), 1, is_output=True, copies=(0,)),  # for which `a` stays when `b` has its copy
        Step("output", 0, CONSTANT, (), (0,)),
    )
    found = timeline_of(Simulator(Problem(values, steps)), np.zeros(2, dtype=bool))
    assert found.live_bytes == (30, 70, 41, 1)
    assert [(b.name, b.nbytes, b.role) for b in found.largest] == [
        ("a", 30, "recomputed"),
        ("a", 30, "copies of inputs"),
        ("b", 10, "recomputed"),
    ]


# -- any problem ------------------------------------------------------------------------------------------------------


@given(problems, st.integers(0, 2**16 - 1))
def test_equals_the_slow_walk(problem: Problem, bits: int) -> None:
    saved = [v for v, value in enumerate(problem.values) if bits >> v & 1 and value.is_saveable]
    found = timeline(problem, plan_saving(*(problem.values[v].name for v in saved)))
    slow = slow_run(problem, saved)
    assert (found.kernels, found.live_bytes) == (slow.kernels, slow.live_bytes)
    assert (found.forward_peak_bytes, found.peak_bytes) == (slow.forward_peak_bytes, slow.peak_bytes)
    sizes = [b.nbytes for b in found.largest]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) <= 5


@pytest.mark.parametrize(("seed", "values", "saved"), [(16434, 4, (1, 4)), (16155, 4, (0, 4)), (5901, 9, (3,))])
def test_what_runs_behind_the_forward_is_written_over_what_waits(
    seed: int, values: int, saved: tuple[int, ...]
) -> None:
    """Not over what is saved, nor over random numbers without a buffer: the next buffer that waits gives its place."""
    problem = seeded_problem(
        seed, Shape(max_values=values, max_steps=3 if values == 4 else 6, with_memory_of_kernels=True)
    )
    found = timeline(problem, plan_saving(*(problem.values[v].name for v in saved)))
    assert found.forward_peak_bytes == slow_run(problem, saved).forward_peak_bytes


@pytest.mark.parametrize("saved", [("nothing",), ("a", "nothing"), ("g0",)])
def test_a_plan_of_another_graph_is_refused(saved: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"saves '{saved[-1]}', which the problem does not have"):
        timeline(chain(), plan_saving(*saved))
