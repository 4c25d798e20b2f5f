"""The cut against brute force; the hull and the bound."""

from itertools import pairwise

import numpy as np
import pytest
from expecttest import assert_expected_inline
from hypothesis import given

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, RECOMPUTE, SAVE, Problem, Step, Value
from compile_remat.passes.search.min_cut import CutSolver, hull, lower_bound_ns, pinned_indices
from tests.oracles.exact_plans import all_plans
from tests.oracles.random_problems import Shape, problems, seeded_problem

PRICES = (0, 1, 3, 17)


@pytest.mark.parametrize("seed", range(30))
def test_value_equals_brute_force(seed: int) -> None:
    problem = seeded_problem(seed, Shape(with_memory_of_kernels=seed % 2 == 1))
    plans = all_plans(problem)
    for price in PRICES:
        cut, exact = CutSolver(problem).cut(price), int((plans.times + price * plans.saved_bytes).min())
        assert cut.time_ns + price * cut.saved_bytes == exact
        assert exact - 0.01 <= cut.value <= exact


@given(problems)
def test_saved_set_does_what_the_cut_says(problem: Problem) -> None:
    for price in PRICES:
        cut = CutSolver(problem).cut(price)
        mask = np.zeros((len(problem.values), 1), dtype=bool)
        mask[list(cut.saved)] = True
        batch = Simulator(problem).run(mask)
        assert (int(batch.saved_bytes[0]), int(batch.time_ns[0])) == (cut.saved_bytes, cut.time_ns)
        assert all(problem.values[k].pin != RECOMPUTE for k in cut.saved)
        assert not set(pinned_indices(problem)) & set(np.flatnonzero(batch.recomputed[:, 0]).tolist())


@given(problems)
def test_hull_is_convex_and_ends_where_it_should(problem: Problem) -> None:
    points = [(c.saved_bytes, c.time_ns) for c in hull(CutSolver(problem))]
    plans = all_plans(problem)
    assert points[0][1] == int(plans.times.min())
    assert points[-1][0] == int(plans.saved_bytes.min())
    assert points[-1][1] == int(plans.times[plans.saved_bytes == plans.saved_bytes.min()].min())
    for (more, fast), (less, slow) in pairwise(points):
        assert more > less and fast <= slow  # equal where recomputing costs nothing: at price 0 that is a tie
    slopes = [(b[1] - a[1]) / (a[0] - b[0]) for a, b in pairwise(points)]
    assert slopes == sorted(slopes)


@pytest.mark.parametrize("seed", range(60))
def test_bound_never_exceeds_the_best_plan(seed: int) -> None:
    """Over all plans that save no more than the budget; and on the hull's corners it is that plan's time."""
    problem = seeded_problem(seed)
    plans, solver = all_plans(problem), CutSolver(problem)
    cuts = hull(solver)
    for budget_bytes in range(int(plans.saved_bytes.max()) + 2):
        fits = plans.saved_bytes <= budget_bytes
        bound = lower_bound_ns(solver, cuts, budget_bytes)
        if bound is None:
            assert not fits.any()
        else:
            best = int(plans.times[fits].min())
            assert 0 <= bound <= best
            corner = [c.time_ns for c in cuts if c.saved_bytes == budget_bytes]
            assert not corner or bound == best


def test_nothing_saves_less_than_the_pins() -> None:
    values = (Value("a", 4, EXTERN, (), 1, pin=SAVE), Value("b", 2, EXTERN, (0,), 1, pin=RECOMPUTE, position=1))
    steps = (Step("g", 1, EXTERN, (1,), (), 1, is_output=True), Step("output", 0, CONSTANT, (), (0,)))
    solver = CutSolver(Problem(values, steps))
    cuts = hull(solver)
    assert [(c.saved, c.saved_bytes, c.time_ns) for c in cuts] == [((0,), 4, 1)]
    assert [lower_bound_ns(solver, cuts, b) for b in (-1, 3, 4, 5)] == [None, None, 1, 1]
    assert pinned_indices(solver.problem) == (0,)


def test_hull_of_a_chain() -> None:
    """Every layer has one byte, layer k costs k + 1: the dear ones are saved longest."""
    values = tuple(Value(f"v{k}", 1, EXTERN, (k - 1,) if k else (), k + 1, position=k) for k in range(4))
    steps = (Step("g", 1, EXTERN, (0, 1, 2, 3), (), 1, is_output=True), Step("output", 0, CONSTANT, (), (0,)))
    cuts = hull(CutSolver(Problem(values, steps)))
    assert_expected_inline(
        "\n".join(f"price {c.price:.1f}: {c.saved_bytes} bytes, {c.time_ns} ns, saves {c.saved}" for c in cuts),
        """\
price 0.0: 4 bytes, 0 ns, saves (0, 1, 2, 3)
price 1.5: 3 bytes, 1 ns, saves (1, 2, 3)
price 2.5: 2 bytes, 3 ns, saves (2, 3)
price 3.5: 1 bytes, 6 ns, saves (3,)
price 11.0: 0 bytes, 10 ns, saves ()""",
    )


def test_a_problem_without_readers() -> None:
    problem = Problem((Value("a", 4, EXTERN, (), 1),), (Step("output", 0, CONSTANT, (), ()),))
    cuts = hull(CutSolver(problem))
    assert [(c.saved, c.saved_bytes, c.time_ns, c.value) for c in cuts] == [((), 0, 0, 0.0)]
