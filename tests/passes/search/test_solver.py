"""The whole planner against brute force over all saved sets."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given

from benchmarks.digest import stored_problems
from compile_remat.passes import Plan, Planner, Problem, Status, Step, Value, solve, timeline
from compile_remat.passes.memory.plan_timeline import peak_bytes_of
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE, SAVE
from compile_remat.passes.search.options import DEFAULT
from tests.oracles.exact_plans import AllPlans, all_plans
from tests.oracles.random_problems import Shape, chain, problems, seeded_problem
from tests.oracles.slow_walk import slow_run

MIB = 1 << 20
LARGE = Shape(max_values=18, max_late=3, max_steps=10)
SMALL = Shape(max_values=8, max_late=2, max_steps=8)


@cache
def case(seed: int) -> tuple[Problem, AllPlans]:
    """A random problem of at most 10 free values or so, and all its plans."""
    problem = seeded_problem(seed, SMALL)
    return problem, all_plans(problem)


def budgets(plans: AllPlans, fastest: Plan) -> list[int]:
    """From the lowest peak of any plan to just below the one of the fastest."""
    low, high = plans.lowest_peak, fastest.peak_bytes
    return sorted({low, low + 1, (low + high) // 2, (low + 3 * high) // 4, max(low, high - 1)})


Solved = list[tuple[int, int, int, Plan]]


@pytest.fixture(scope="module", params=[range(50), pytest.param(range(50, 150), marks=pytest.mark.full)], ids=str)
def seeds(request: pytest.FixtureRequest) -> range:
    found: range = request.param
    return found


@pytest.fixture(scope="module")
def solved(seeds: range) -> Solved:
    """Seed, budget, least extra time of any plan, the planner's plan."""
    found = []
    for seed in seeds:
        problem, plans = case(seed)
        planner = Planner(problem)
        for budget_bytes in budgets(plans, planner.fastest()):
            best = plans.fastest_within(budget_bytes)
            assert best is not None
            found.append((seed, budget_bytes, best - int(plans.times.min()), planner.within(budget_bytes)))
    return found


def test_a_plan_is_found_where_there_is_one(solved: Solved) -> None:
    """Measured: all but 1 of 373; a budget within a byte of the floor can be missed."""
    missed = [(seed, budget) for seed, budget, _, plan in solved if not plan.is_feasible]
    assert len(missed) <= 0.02 * len(solved), missed


@pytest.mark.parametrize("seed", [*range(0, 150, 30), 116])
def test_what_the_lowest_plan_fits_is_feasible(seed: int) -> None:
    """Seed 116: polishing the lowest plan for speed must not push it over the budget again."""
    planner = Planner(seeded_problem(seed, Shape(max_values=9, max_late=2, max_steps=8)))
    floor = planner.lowest().peak_bytes
    for budget_bytes in (floor, floor + 1, floor + 2):
        assert planner.within(budget_bytes).is_feasible


def test_most_plans_are_the_fastest(solved: Solved) -> None:
    """Measured: 370 of 372."""
    feasible = [(best, plan) for _, _, best, plan in solved if plan.is_feasible]
    count = Counter(plan.extra_time_ns == best for best, plan in feasible)
    assert count[True] >= 0.97 * len(feasible), count


def test_no_claim_is_wrong(solved: Solved) -> None:
    for seed, budget_bytes, best, plan in solved:
        where = (seed, budget_bytes)
        assert plan.budget_bytes == budget_bytes
        assert plan.is_feasible == (plan.peak_bytes <= budget_bytes), where
        assert plan.bound_time_ns <= best, where
        if plan.is_feasible:
            assert plan.extra_time_ns >= best, where
            assert plan.gap >= 0
        if plan.status is Status.OPTIMAL:
            assert plan.extra_time_ns == best, where


def test_the_bound_proves_something(solved: Solved) -> None:
    """Measured: of 161 plans that must be slower, 29 have a bound above 0 and 5 a proof; temporaries rule so small graphs."""
    slower = [plan for _, _, best, plan in solved if best > 0]
    assert sum(plan.bound_time_ns > 0 for plan in slower) >= 0.155 * len(slower)
    assert sum(plan.status is Status.OPTIMAL for plan in slower) >= 0.024 * len(slower)


def test_what_a_plan_says_is_what_the_slow_walk_finds(solved: Solved) -> None:
    for seed, _, _, plan in solved[::7]:
        problem = seeded_problem(seed, SMALL)
        index = {v.name: i for i, v in enumerate(problem.values)}
        slow = slow_run(problem, [index[name] for name in plan.saved])
        assert plan.peak_bytes == slow.peak_bytes
        assert plan.forward_peak_bytes == slow.forward_peak_bytes
        assert {index[name] for name in plan.recomputed} == slow.recomputed
        assert plan.extra_time_ns == slow.time_ns - int(case(seed)[1].times.min())
        assert plan.recompute_time_ns == sum(problem.values[v].time_ns for v in slow.recomputed)
        assert plan.problem_key == problem.key()


def test_lowest_peak(seeds: range) -> None:
    """Measured: 149 of 150 equal the lowest peak of any plan."""
    peaks = [(Planner(case(seed)[0]).lowest().peak_bytes, case(seed)[1].lowest_peak) for seed in seeds]
    assert all(ours >= best for ours, best in peaks)
    assert sum(ours == best for ours, best in peaks) >= 0.97 * len(peaks)


@pytest.mark.parametrize("seed", range(10))
def test_fastest_is_exact(seed: int) -> None:
    problem, plans = case(seed)
    plan = Planner(problem).fastest()
    assert (plan.extra_time_ns, plan.bound_time_ns, plan.status) == (0, 0, Status.OPTIMAL)
    within = Planner(problem).within(plan.peak_bytes)
    assert (within.saved, within.status) == (plan.saved, Status.OPTIMAL)
    assert plan.recompute_time_ns <= int(plans.times.min())


@given(problems)
def test_pins_are_kept(problem: Problem) -> None:
    planner = Planner(problem)
    pinned = {v.name for v in problem.values if v.pin == SAVE and v.is_saveable}
    barred = {v.name for v in problem.values if not v.is_saveable}
    for plan in (
        planner.fastest(),
        planner.lowest(),
        planner.no_worse_than_torch(),
        planner.within(planner.lowest().peak_bytes),
    ):
        assert not pinned & set(plan.recomputed)
        assert not barred & set(plan.saved)
        assert not set(plan.saved) & set(plan.recomputed)


def test_a_larger_budget_is_seldom_slower(is_full: bool) -> None:
    """Measured: 2 of 290 steps; the search is a heuristic, so that is a share and not a rule."""
    slower = count = 0
    for seed in range(60 if is_full else 20):
        planner = Planner(seeded_problem(seed, Shape(max_values=12, max_late=3, max_steps=10)))
        low, high = planner.lowest().peak_bytes, planner.fastest().peak_bytes
        plans = [planner.within(b) for b in range(low, high + 1)]
        assert all(p.is_feasible for p in plans)
        best = plans[0].extra_time_ns
        for plan in plans[1:]:
            count += 1
            slower += plan.extra_time_ns > best
            best = min(best, plan.extra_time_ns)
    assert slower <= 0.05 * count, (slower, count)


@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_a_fresh_planner_gives_the_same_plan(seed: int) -> None:
    problem, plans = case(seed)
    for budget_bytes in (plans.lowest_peak, plans.lowest_peak + 2):
        assert Planner(problem).within(budget_bytes) == solve(Problem.from_json(problem.to_json()), budget_bytes)
    assert Planner(problem).lowest() == Planner(problem).lowest()


@pytest.mark.parametrize("seed", range(4))
def test_below_the_floor_the_lowest_plan_comes_back_over_budget(seed: int) -> None:
    problem, plans = case(seed)
    planner = Planner(problem)
    plan = planner.within(plans.lowest_peak - 1)
    assert plan.status is Status.OVER_BUDGET and not plan.is_feasible
    assert plan.peak_bytes == planner.lowest().peak_bytes
    assert plan.budget_bytes == plans.lowest_peak - 1


@pytest.mark.parametrize("seed", range(10))
def test_reference_is_never_worse_than_torchs_choice(seed: int) -> None:
    problem, _ = case(seed)
    rng = np.random.default_rng(seed)
    chosen = tuple(v for v, x in enumerate(problem.values) if x.is_saveable and rng.random() < 0.5)
    planner = Planner(Problem(problem.values, problem.steps, problem.step_time_ns, chosen))
    theirs = planner.plan_of(planner.mask_of(problem.values[v].name for v in chosen), None)
    ours = planner.no_worse_than_torch()
    assert ours.peak_bytes <= theirs.peak_bytes
    assert ours.saved_bytes <= theirs.saved_bytes
    assert ours.extra_time_ns <= theirs.extra_time_ns


def test_mask_of_names_what_is_not_there() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        Planner(case(0)[0]).mask_of(["nowhere"])


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_chain_of_equal_layers_gets_spaced_checkpoints() -> None:
    """No price finds these; the least peak with one recompute of each is about 2 sqrt(n)."""
    planner = Planner(chain(64, MIB, 1000))
    lowest = planner.lowest()
    assert lowest.peak_bytes <= 18 * MIB
    gaps = np.diff([int(name[1:]) for name in lowest.saved])
    assert gaps.max() <= 16
    half = planner.within(33 * MIB)
    assert half.is_feasible and half.extra_time_ns <= 45_000
    assert timeline(planner.problem, half).peak_bytes == half.peak_bytes


def test_the_bound_does_not_count_a_first_step_that_writes_over_what_was_saved() -> None:
    """Two saved values fit in 2 bytes, because the first step's result takes the place of one of them."""
    values = (Value("a", 1, EXTERN, (), 5), Value("b", 1, EXTERN, (), 5, position=1))
    steps = (
        Step("g0", 1, POINTWISE, (0,), ()),
        Step("g1", 1, EXTERN, (1,), (0,), is_output=True),
        Step("output", 0, CONSTANT, (), (1,)),
    )
    plan = Planner(Problem(values, steps)).plan_of(np.array([True, True]), 3)
    assert plan.status is Status.OPTIMAL
    assert Planner(Problem(values, steps)).within(2).bound_time_ns <= 5


def test_the_bound_counts_a_first_step_that_nothing_can_precede() -> None:
    """The first step writes 4 bytes beside all that is saved: of 2 x 4 bytes saved only one fits in 8."""
    values = (Value("a", 4, EXTERN, (), 5), Value("b", 4, EXTERN, (), 7, position=1))
    steps = (
        Step("g0", 4, EXTERN, (), ()),
        Step("g1", 0, EXTERN, (1,), (0,)),
        Step("g2", 1, EXTERN, (0,), (1,), is_output=True),
        Step("output", 0, CONSTANT, (), (2,)),
    )
    plan = Planner(Problem(values, steps)).within(8)
    assert (plan.saved, plan.extra_time_ns, plan.bound_time_ns, plan.status) == (("b",), 5, 5, Status.OPTIMAL)


def test_a_problem_whose_backward_reads_no_value() -> None:
    steps = (Step("g", 2, EXTERN, (), (), is_output=True), Step("output", 0, CONSTANT, (), (0,)))
    problem = Problem((Value("a", 4, EXTERN, (), 1),), steps)
    for plan in (Planner(problem).fastest(), Planner(problem).lowest(), solve(problem, 4), solve(problem, 1)):
        assert (plan.saved, plan.recomputed, plan.peak_bytes) == ((), (), 4)
    assert not solve(problem, 1).is_feasible


@pytest.mark.parametrize("seed", range(12))
def test_the_search_goes_on_from_plans_that_were_observed(seed: int) -> None:
    """Neither the lowest plan nor one within a budget is worse than what local search makes of such a plan."""
    problem = seeded_problem(seed, LARGE)
    before = Planner(problem).lowest()
    grown = replace(
        problem, values=tuple(replace(v, nbytes=2 * v.nbytes) if k % 3 else v for k, v in enumerate(problem.values))
    )
    known = replace(grown, plans=((before.saved, before.again), (("a value of another graph",), ())))
    lowest, alone = Planner(known).lowest(), Planner(grown).lowest()
    there_bytes = peak_bytes_of(grown, before.saved, before.again)
    assert lowest.peak_bytes * DEFAULT.same_peak <= min(alone.peak_bytes, there_bytes)
    assert lowest.peak_bytes == peak_bytes_of(grown, lowest.saved, lowest.again)
    budget_bytes = int(1.1 * lowest.peak_bytes)
    within, without = Planner(known).within(budget_bytes), Planner(grown).within(budget_bytes)
    assert within.peak_bytes <= budget_bytes and within.status is not Status.OVER_BUDGET
    assert without.status is Status.OVER_BUDGET or within.extra_time_ns <= without.extra_time_ns


@pytest.mark.parametrize("seed", range(8))
def test_local_search_from_the_lowest_plan_finds_none_much_lower(seed: int) -> None:
    planner = Planner(seeded_problem(seed, LARGE))
    lowest = planner.lowest()
    again = replace(planner.problem, plans=((lowest.saved, lowest.again),))
    assert Planner(again).lowest().peak_bytes >= lowest.peak_bytes * DEFAULT.same_peak


def test_the_lowest_plan_is_searched_for_with_prices_of_bytes_too() -> None:
    """With times alone the search gets stuck: BERT on a GPU took 521.5 MiB at `min`, and 488.4 are enough."""
    planner = Planner(stored_problems()["resnet"])
    lowest, by_time = planner.lowest(), planner._low_by_time
    assert planner._low_by_bytes.peak_bytes < 0.995 * by_time.peak_bytes
    assert lowest.peak_bytes * DEFAULT.same_peak <= planner._low_by_bytes.peak_bytes
    assert planner.within(lowest.peak_bytes).is_feasible


def test_prices_of_bytes_are_spared_behind_a_recursive_plan() -> None:
    planner = Planner(stored_problems()["gpt small"])
    lowest = planner.lowest()
    assert lowest.again and lowest.peak_bytes == planner._low_by_time.peak_bytes
    assert "_low_by_bytes" not in vars(planner)
    assert planner._low_by_bytes.peak_bytes > lowest.peak_bytes * DEFAULT.same_peak


@pytest.mark.parametrize("name", ["chain1024", "unet small"])
def test_no_plan_is_searched_for_below_one_near_the_least_peak(name: str) -> None:
    problem = stored_problems()[name]
    quick, thorough = Planner(problem), Planner(problem, options=replace(DEFAULT, close_peak=math.inf))
    found = quick.lowest()
    assert len(quick.minimum_peak.found) == 1 < len(thorough.minimum_peak.found)
    assert found.least_peak_bytes >= DEFAULT.close_peak * found.peak_bytes
    assert (found.saved, found.peak_bytes) == (thorough.lowest().saved, thorough.lowest().peak_bytes)
