"""Plans with copies against all plans with all sets of copies, on small problems; and a bound that none of them undercuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.common import synthetic
from compile_remat.passes import Link, Plan, Planner, Problem
from compile_remat.passes.problem.problem import POINTWISE, REDUCTION, Value
from compile_remat.passes.search.offload.transfers import transfers_of
from tests.oracles.exact_plans import all_plans
from tests.oracles.random_problems import Shape, chain, seeded_problem
from tests.oracles.scaled import BYTES, scaled

MIB_PER_MS = 10**3 * BYTES


def fastest_ns(problem: Problem, link: Link, budget_bytes: int) -> int | None:
    """Extra time of the fastest of all plans with all sets of copies that keep the budget; None if there is none."""
    planner, best = Planner(problem), None
    for mask in all_plans(problem).masks.T:
        curve = planner.curve(mask)
        for size in range(len(curve.movable) + 1):
            for moved in itertools.combinations(curve.movable, size):
                made = transfers_of(curve, moved, link, budget_bytes)
                if made.peak_bytes <= budget_bytes and made.nbytes <= link.host_bytes:
                    time_ns = planner.search.time(mask) - planner.fastest_time_ns + made.stall_ns
                    best = time_ns if best is None else min(best, time_ns)
    return best


def planned(problem: Problem, link: Link, budget_bytes: int) -> Plan:
    return Planner(problem, link=link).within(budget_bytes)


@pytest.mark.parametrize("rate", [2, 10, 1000])
@pytest.mark.parametrize("seed", range(12))
def test_small_problems(seed: int, rate: int) -> None:
    problem = scaled(seeded_problem(seed, Shape(max_values=6, max_late=0, max_steps=5)))
    link = Link(rate * MIB_PER_MS, rate * MIB_PER_MS, 1 << 50)
    lowest, fastest = Planner(problem).lowest().peak_bytes, Planner(problem).fastest().peak_bytes
    for budget_bytes in range(max(BYTES, lowest - 2 * BYTES), fastest, BYTES):
        plan, best = planned(problem, link, budget_bytes), fastest_ns(problem, link, budget_bytes)
        if best is None:
            assert not plan.is_feasible
            continue
        if plan.is_feasible and not plan.again:
            assert plan.extra_time_ns >= best  # all plans were tried
            assert plan.bound_time_ns <= best or not plan.offloaded


@pytest.mark.parametrize("rate", [1, 5, 50])
def test_chains_are_near_the_best(rate: int) -> None:
    """Within a tenth of the step of the best of all sets, and never worse than without copies."""
    problem = scaled(chain(7))
    link = Link(rate * MIB_PER_MS, rate * MIB_PER_MS, 1 << 50)
    for budget_bytes in range(3 * BYTES, 8 * BYTES, BYTES):
        plan, best = planned(problem, link, budget_bytes), fastest_ns(problem, link, budget_bytes)
        without = Planner(problem).within(budget_bytes)
        assert best is not None
        if plan.is_feasible:
            assert plan.extra_time_ns <= without.extra_time_ns or not without.is_feasible
            assert plan.extra_time_ns - best <= 0.1 * problem.step_time_ns, (budget_bytes // BYTES, plan)


def test_layers_on_a_fast_link_recompute_less_and_the_bound_follows() -> None:
    problem = synthetic.equal_layers(8)
    budget_bytes = int(0.75 * Planner(problem).fastest().peak_bytes)
    without = Planner(problem).within(budget_bytes)
    some = planned(problem, Link(10 * 10**9, 10 * 10**9, 1 << 50), budget_bytes)
    plan = planned(problem, Link(50 * 10**9, 50 * 10**9, 1 << 50), budget_bytes)
    assert plan.extra_time_ns < some.extra_time_ns < without.extra_time_ns
    assert plan.offloaded and plan.peak_bytes <= budget_bytes and plan.stall_time_ns >= 0
    assert plan.bound_time_ns <= some.bound_time_ns <= without.bound_time_ns
    assert plan.bound_time_ns <= plan.extra_time_ns


def test_a_plan_with_copies_saves_a_result_in_place_of_its_operand() -> None:
    """Saving the operand would be free, too, but it costs the backward an operation."""
    layers = synthetic.equal_layers(8)
    count = len(layers.values)
    values = (
        *layers.values,
        Value("count", 4, REDUCTION, (0,), 2000, position=count),
        Value("as_float", 4, POINTWISE, (count,), 0, position=count + 1, save_time_ns=1),
    )
    loss = replace(layers.steps[0], reads=(*layers.steps[0].reads, count + 1))
    problem = replace(layers, values=values, steps=(loss, *layers.steps[1:]))
    budget_bytes = int(0.75 * Planner(problem).fastest().peak_bytes)
    plan = planned(problem, Link(50 * 10**9, 50 * 10**9, 1 << 50), budget_bytes)
    assert plan.offloaded and {"count", "as_float"}.intersection(plan.saved) == {"as_float"}


def test_host_memory_is_a_limit() -> None:
    problem = synthetic.equal_layers(8)
    budget_bytes = int(0.75 * Planner(problem).fastest().peak_bytes)
    whole = planned(problem, Link(50 * 10**9, 50 * 10**9, 1 << 50), budget_bytes)
    half = planned(problem, Link(50 * 10**9, 50 * 10**9, whole.offloaded_bytes // 2), budget_bytes)
    none = planned(problem, Link(50 * 10**9, 50 * 10**9, 1), budget_bytes)
    assert whole.host_bytes == whole.offloaded_bytes <= whole.link_bytes
    rounded = planned(problem, Link(50 * 10**9, 50 * 10**9, whole.offloaded_bytes, rounds_up=True), budget_bytes)
    assert rounded.offloaded_bytes <= rounded.host_bytes <= whole.offloaded_bytes
    assert half.offloaded_bytes <= whole.offloaded_bytes // 2
    assert whole.extra_time_ns <= half.extra_time_ns <= none.extra_time_ns
    assert not none.offloaded and none.extra_time_ns == Planner(problem).within(budget_bytes).extra_time_ns


def test_a_plan_below_every_recomputing_plan() -> None:
    """Where recomputation cannot go lower, copies can: the forward's own saved tensors leave one by one."""
    problem = scaled(chain(7))
    lowest = Planner(problem).lowest()
    plan = planned(problem, Link(1000 * MIB_PER_MS, 1000 * MIB_PER_MS, 1 << 50), lowest.peak_bytes - BYTES)
    assert plan.is_feasible and plan.offloaded


def lowest_bytes(problem: Problem, link: Link) -> int:
    """The lowest peak of all plans with all sets of copies, if kernels wait for each of them."""
    planner = Planner(problem)
    peaks = [
        transfers_of(curve, moved, link, 0).peak_bytes
        for curve in map(planner.curve, all_plans(problem).masks.T)
        for size in range(len(curve.movable) + 1)
        for moved in itertools.combinations(curve.movable, size)
        if sum(each.nbytes for each in moved) <= link.host_bytes
    ]
    return min(peaks)


@pytest.mark.parametrize("seed", range(24))
def test_the_lowest_plan_of_small_problems_uses_copies_only_where_they_lower_it(seed: int) -> None:
    problem = scaled(seeded_problem(seed, Shape(max_values=6, max_late=0, max_steps=5)))
    kept = Planner(problem).lowest()
    for host_bytes in (1 << 50, 4 * BYTES):
        link = Link(2 * MIB_PER_MS, 2 * MIB_PER_MS, host_bytes)
        plan, least = Planner(problem, link=link).lowest(), lowest_bytes(problem, link)
        assert plan.peak_bytes <= kept.peak_bytes and plan.offloaded_bytes <= host_bytes
        assert plan.again or least <= plan.peak_bytes
        assert plan.least_peak_bytes <= plan.peak_bytes
        assert bool(plan.offloaded) == (plan.peak_bytes < kept.peak_bytes)
        if plan.offloaded:
            within = planned(problem, link, plan.peak_bytes)
            assert within.is_feasible and within.offloaded


@pytest.mark.parametrize("length", [5, 7])
def test_the_lowest_plan_of_a_chain_is_the_lowest_of_all(length: int) -> None:
    problem, link = scaled(chain(length)), Link(MIB_PER_MS, MIB_PER_MS, 1 << 50)
    plan = Planner(problem, link=link).lowest()
    assert plan.offloaded and plan.stall_time_ns and plan.peak_bytes == lowest_bytes(problem, link)
    below = planned(problem, link, plan.peak_bytes - 1)
    assert not below.is_feasible and below.peak_bytes == plan.peak_bytes and below.offloaded


def test_the_same_plan_in_json() -> None:
    problem = synthetic.equal_layers(8)
    plan = planned(problem, Link(50 * 10**9, 50 * 10**9, 1 << 50), int(0.75 * Planner(problem).fastest().peak_bytes))
    assert plan.offloaded and Plan.from_json(plan.to_json()) == plan
    assert "on the host" in str(plan)
