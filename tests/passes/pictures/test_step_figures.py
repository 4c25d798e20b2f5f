"""Live bytes column by column are what the simulator adds up, for any plan of any problem."""

import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compile_remat.pages.figures import Kind
from compile_remat.passes.memory.on_host import live_on_device
from compile_remat.passes.memory.plan_timeline import candidate_of
from compile_remat.passes.pictures.step_figures import aligned, figures_of_step
from compile_remat.passes.problem.plan import Offloaded
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, Origin, Problem, Step, Value
from tests.oracles.observed_facts import any_plan
from tests.oracles.random_problems import problems


def chain() -> Problem:
    """a -> b -> out in the forward; in the backward `g0` reads b, then `g1` reads `g0` and a and is returned."""
    values = (
        Value("a", 10, EXTERN, (), 1, origin=Origin((5, 2), "int8", "body", "model.py:3")),
        Value("b", 20, EXTERN, (0,), 1, position=1, transient_bytes=3),
        Value("out", 5, EXTERN, (1,), 1, position=2, is_output=True),
    )
    steps = (
        Step("g0", 4, EXTERN, (1,), (), 1),
        Step("g1", 8, EXTERN, (0,), (0,), 1, is_output=True),
        Step("output", 0, CONSTANT, (), (1,)),
    )
    return Problem(values, steps, 5)


def test_a_step_by_hand() -> None:
    """Saved is a alone, so b is freed in the forward and computed again, with the 3 bytes that its kernel writes for nobody."""
    figures = figures_of_step(candidate_of(chain(), ["a"], ()))
    assert figures.columns == ("a", "b", "out", "end of the forward", "b", "g0", "g1", "output")
    assert figures.num_forward == 4
    assert figures.times_ns == (1, 1, 1, 0, 1, 1, 1, 0)
    assert figures.areas == {
        Kind.OUTPUT: (0, 0, 5, 5, 5, 5, 5, 5),
        Kind.GRADIENT: (0, 0, 0, 0, 0, 0, 8, 8),
        Kind.SAVED: (10, 10, 10, 10, 10, 10, 10, 0),
        Kind.RECOMPUTED: (0, 0, 0, 0, 20, 20, 0, 0),
        Kind.TEMPORARY: (0, 23, 20, 0, 3, 4, 4, 0),
    }
    found = {(t.name, t.kind.value, t.begin, t.end, t.fate) for t in figures.tensors}
    assert found == {
        ("a", "saved", 0, 6, "saved for the backward"),
        ("b", "temporary", 1, 2, "freed, and computed again in the backward"),
        ("b", "recomputed", 4, 5, "computed again in the backward"),
        ("out", "output", 2, 7, "output of the forward"),
        ("g0", "temporary", 5, 6, "freed after its last reader"),
        ("g1", "gradient", 6, 7, "gradient that the backward returns"),
    }
    (a,) = (t for t in figures.tensors if t.name == "a")
    assert (a.shape, a.dtype, a.module_path, a.source_line) == ((5, 2), "int8", "body", "model.py:3")


def test_a_value_that_is_computed_a_third_time_is_shown_under_its_own_name() -> None:
    figures = figures_of_step(candidate_of(chain(), [], ("a",)))
    assert [t.fate for t in figures.tensors if t.name == "a" and t.kind is Kind.RECOMPUTED] == [
        "computed again in the backward",
        "computed a third time",
    ]


@given(problems, st.data())
def test_the_columns_hold_the_peak_and_no_tensor_is_larger_than_its_area(problem: Problem, data: st.DataObject) -> None:
    saveable = [v.name for v in problem.values if v.is_saveable]
    found = candidate_of(problem, data.draw(st.lists(st.sampled_from(saveable), unique=True)) if saveable else [], ())
    figures = figures_of_step(found)
    assert max(figures.live_bytes) == found.peak_bytes
    assert max(figures.live_bytes[: figures.num_forward]) == int(found.batch.forward_peak[0])
    for kind, area in figures.areas.items():
        own = np.zeros(len(area) + 1, dtype=np.int64)
        for tensor in figures.tensors:
            if tensor.kind is kind:
                own[tensor.begin] += tensor.nbytes
                own[tensor.end + 1] -= tensor.nbytes
        of_tensors = np.cumsum(own)[:-1].tolist()
        if kind is Kind.TEMPORARY:
            assert all(known <= all_bytes for known, all_bytes in zip(of_tensors, area, strict=True))
        else:
            assert tuple(of_tensors) == area


def test_another_plan_stands_in_the_columns_of_this_one() -> None:
    """b is not among the columns: what was live then counts at a; c and the column that nothing runs at follow."""
    assert aligned([("a", 1), ("b", 5), ("b2", 2), ("c", 3), ("e", 1)], ["a", "x", "c", "d", "e"]) == [5, 2, 3, 3, 1]


def test_a_plan_is_compared_with_itself() -> None:
    figures = figures_of_step(candidate_of(chain(), ["a"], ()))
    levels = list(zip(figures.columns, figures.live_bytes, strict=True))
    again = figures_of_step(candidate_of(chain(), ["a"], ()), ("itself", levels[:4], levels[4:]))
    assert again.other is not None and again.other.live_bytes == figures.live_bytes
    assert replace(again, other=None) == figures


def test_a_value_on_the_host_takes_no_memory_in_between() -> None:
    figures = figures_of_step(candidate_of(chain(), ["a", "b"], ()), offloaded=[Offloaded("a", "out", "g1")])
    assert figures.columns == ("a", "b", "out", "end of the forward", "g0", "g1", "output")
    assert figures.areas[Kind.SAVED] == (10, 30, 20, 20, 20, 10, 0)
    found = [(t.begin, t.end, t.fate) for t in figures.tensors if t.name == "a"]
    fate = "saved for the backward, on the host in between"
    assert found == [(0, 1, fate), (5, 5, fate)]


@given(problems, st.randoms(use_true_random=False))
def test_the_areas_of_a_plan_with_copies_add_up(problem: Problem, rng: random.Random) -> None:
    chosen = any_plan(rng, problem)
    found = candidate_of(problem, chosen.saved, chosen.again)
    figures = figures_of_step(found, offloaded=chosen.offloaded)
    assert max(figures.live_bytes) == live_on_device(found, chosen.offloaded).peak_bytes
    own = np.zeros(len(figures.columns) + 1, dtype=np.int64)
    for tensor in figures.tensors:
        if tensor.kind is Kind.SAVED:
            own[tensor.begin] += tensor.nbytes
            own[tensor.end + 1] -= tensor.nbytes
    assert tuple(np.cumsum(own)[:-1].tolist()) == figures.areas[Kind.SAVED]
    assert min(figures.areas[Kind.TEMPORARY], default=0) >= 0
