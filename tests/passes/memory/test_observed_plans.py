"""Assumptions after a plan was observed: never less than was observed, and never less than before."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_remat.passes.memory.candidate_plan import Candidate
from compile_remat.passes.memory.observed_plans import (
    NOTEWORTHY,
    assumptions_after,
    excess_at_nodes,
    largest_at_peak,
    longest_ascending,
)
from compile_remat.passes.memory.on_host import live_on_device
from compile_remat.passes.memory.plan_timeline import candidate_of, peak_bytes_of
from compile_remat.passes.problem.facts import (
    NOTHING_ASSUMED,
    Assumptions,
    BufferFacts,
    GraphFacts,
    KernelFacts,
    RegionFacts,
)
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE, Origin, Problem, Step, Value
from tests.oracles.observed_facts import Chosen, any_plan, facts_as_simulated
from tests.oracles.random_problems import problems


def any_graph(rng: random.Random, names: list[str], most_bytes: int) -> GraphFacts:
    """Kernels and buffers of some of the nodes, of none, and of nodes that the problem does not have."""
    known = [*names, "a_copy", "another_copy"]
    kernels = [
        KernelFacts(tuple(rng.sample(known, rng.randint(0, min(3, len(known))))), rng.randint(1, most_bytes))
        for _ in range(rng.randint(1, 6))
    ]
    stored = {name: rng.randint(1, 8) for name in known if rng.random() < 0.4}
    return GraphFacts(tuple(kernels), stored)


def any_facts(rng: random.Random, found: Candidate, *, may_be_large: bool = True) -> RegionFacts:
    """Facts that no code generator may give for this plan: assumptions have to hold for any facts."""
    values, steps = found.simulator.problem.values, found.simulator.problem.steps
    most_bytes = rng.choice([1, 2, 3]) * found.peak_bytes + 5 if may_be_large else 5
    forward = any_graph(rng, [v.name for v in values if v.in_forward], most_bytes)
    backward = any_graph(rng, [v.name for v in values] + [s.name for s in steps], most_bytes)
    return RegionFacts(forward, backward, most_of([*forward.kernels, *backward.kernels]))


def most_of(kernels: Iterable[KernelFacts]) -> int:
    return max(kernel.live_bytes for kernel in kernels)


rngs = st.randoms(use_true_random=False)


@given(problems, rngs)
def test_the_plan_needs_at_least_what_was_observed_of_it(problem: Problem, rng: random.Random) -> None:
    """Else the search takes the same plan again.  Over rounds, as a compilation has them: each on what all before have shown."""
    assumed = NOTHING_ASSUMED
    for _ in range(4):
        chosen, known = any_plan(rng, problem), problem.with_facts(assumed)
        facts = any_facts(rng, candidate_of(known, chosen.saved, chosen.again))
        after = assumptions_after(known, chosen.plan, facts, assumed)
        if after.written != assumed.written:  # its graphs would now be others: taken to be the same
            after = assumptions_after(problem.with_facts(after), chosen.plan, facts, after)
        assumed = after
        found = candidate_of(problem.with_facts(assumed), chosen.saved, chosen.again)
        peak_bytes = live_on_device(found, chosen.offloaded).peak_bytes
        if any(v.in_forward for v in problem.values):
            assert peak_bytes >= facts.peak_bytes * (1 - NOTEWORTHY)
        else:  # a forward without nodes has no place for what it takes
            assert peak_bytes >= most_of(facts.backward.kernels) * (1 - NOTEWORTHY)


@given(problems, rngs)
def test_what_is_assumed_only_rises(problem: Problem, rng: random.Random) -> None:
    assumed = NOTHING_ASSUMED
    for _ in range(4):
        chosen, known = any_plan(rng, problem), problem.with_facts(assumed)
        found = candidate_of(known, chosen.saved, chosen.again)
        facts = any_facts(rng, found, may_be_large=rng.random() < 0.7)
        after = assumptions_after(known, chosen.plan, facts, assumed)
        for name in ("stored", "stored_again"):
            before, now = dict(getattr(assumed, name)), dict(getattr(after, name))
            assert before.keys() <= now.keys()
            changed = {node: is_stored for node, is_stored in now.items() if before.get(node) != is_stored}
            assert assumed == NOTHING_ASSUMED or all(changed.values()), "a buffer that was seen is not taken away"
        for name in ("forward_bytes", "backward_bytes"):
            before, now = dict(getattr(assumed, name)), dict(getattr(after, name))
            assert all(now[node] >= nbytes for node, nbytes in before.items())
            assert all(nbytes > 0 for nbytes in now.values())
        for part in (after.stored, after.stored_again, after.forward_bytes, after.backward_bytes):
            assert list(part) == sorted(dict(part).items())  # equal ones are one key in torch's caches
        assert Assumptions.from_text(after.to_text()) == after
        assumed = after


@given(problems, rngs)
def test_facts_as_simulated_give_nothing_to_assume(problem: Problem, rng: random.Random) -> None:
    chosen = any_plan(rng, problem)
    found = candidate_of(problem, chosen.saved, chosen.again)
    facts = facts_as_simulated(found, chosen.offloaded)
    assert assumptions_after(problem, chosen.plan, facts, NOTHING_ASSUMED) == NOTHING_ASSUMED


@given(problems, rngs)
def test_what_was_assumed_once_is_not_assumed_twice(problem: Problem, rng: random.Random) -> None:
    """The same plan, observed again: a round that brings nothing new ends the search."""
    chosen = any_plan(rng, problem)
    facts = any_facts(rng, candidate_of(problem, chosen.saved, chosen.again))
    assumed = assumptions_after(problem, chosen.plan, facts, NOTHING_ASSUMED)
    known = problem.with_facts(assumed)
    found = candidate_of(known, chosen.saved, chosen.again)
    assert assumptions_after(known, chosen.plan, facts_as_simulated(found, chosen.offloaded), assumed) == assumed
    after = assumptions_after(known, chosen.plan, facts, assumed)
    if not assumed.written and (after.stored, after.stored_again) == (assumed.stored, assumed.stored_again):
        assert after == assumed


# -- by hand ----------------------------------------------------------------------------------------------------------

LAYERS = Problem(
    values=(
        Value("mm", 1000, EXTERN, (), 9),
        Value("sin", 1000, POINTWISE, (0,), 2, position=1),
        Value("cos", 1000, POINTWISE, (1,), 2, position=2),
        Value("mm_1", 1000, EXTERN, (2,), 9, position=3, is_output=True),
    ),
    steps=(
        Step("mul", 1000, POINTWISE, (2,), (), 2),
        Step("mul_1", 1000, POINTWISE, (1,), (0,), 2),
        Step("mm_2", 1000, EXTERN, (0,), (1,), 9, is_output=True),
        Step("output", 0, CONSTANT, (), (2,)),
    ),
)
"""``mm -> sin -> cos -> mm_1``, of which the plan saves ``mm``."""

SAVING_MM = Chosen(("mm",)).plan


def simulated() -> RegionFacts:
    return facts_as_simulated(candidate_of(LAYERS, SAVING_MM.saved, ()))


def replaced(
    graph: GraphFacts, *, live: dict[str, int] | None = None, at_peak: Iterable[str] = (), **stored: bool
) -> GraphFacts:
    """The graph with other bytes at some kernels, some buffers at its peak, and some nodes that are written or are not."""
    kernels = [KernelFacts(k.nodes, (live or {}).get(k.nodes[0], k.live_bytes)) for k in graph.kernels]
    kept = {name: nbytes for name, nbytes in graph.stored.items() if stored.get(name, True)}
    named = kept | {name: 1000 for name, is_stored in stored.items() if is_stored}
    return GraphFacts(tuple(kernels), named, tuple(BufferFacts(name, 1000) for name in at_peak))


def test_buffers_of_the_forward_and_of_the_backward_are_assumed_each_for_itself() -> None:
    facts = simulated()
    assert "cos" in facts.forward.stored and "sin" not in facts.forward.stored
    forward = replaced(facts.forward, sin=True, cos=False)
    seen = RegionFacts(forward, facts.backward, facts.peak_bytes)
    first = assumptions_after(LAYERS, SAVING_MM, seen, NOTHING_ASSUMED)
    assert first == Assumptions(stored=(("cos", False), ("sin", True)))
    backward = replaced(facts.backward, sin=True, mul=True)
    seen = RegionFacts(facts.forward, backward, facts.peak_bytes)
    assert assumptions_after(LAYERS, SAVING_MM, seen, NOTHING_ASSUMED).stored == ()
    assert assumptions_after(LAYERS, SAVING_MM, seen, NOTHING_ASSUMED).stored_again == (("mul", True), ("sin", True))


def test_a_buffer_is_taken_away_by_the_first_plan_alone() -> None:
    """A buffer that an earlier plan's graphs wrote may be written by another plan's again, though this plan's do not."""
    facts = simulated()
    seen = RegionFacts(replaced(facts.forward, cos=False), facts.backward, facts.peak_bytes)
    before = Assumptions(backward_bytes=(("mul", 1),))
    assert assumptions_after(LAYERS.with_facts(before), SAVING_MM, seen, before) == before


def test_nodes_that_are_computed_by_no_kernel_say_nothing() -> None:
    """A node that a pass of Inductor has replaced is in no kernel, so it is unknown whether the node is written."""
    facts = simulated()
    kernels = tuple(KernelFacts(("other",), k.live_bytes) for k in facts.forward.kernels)
    seen = RegionFacts(GraphFacts(kernels, {"other": 1000}), facts.backward, facts.peak_bytes)
    found = assumptions_after(LAYERS, SAVING_MM, seen, NOTHING_ASSUMED)
    assert (found.stored, found.stored_again) == ((), ())


def test_bytes_above_the_simulated_ones_stand_at_the_kernel() -> None:
    facts = simulated()
    levels = {k.nodes[0]: k.live_bytes for k in facts.backward.kernels}
    backward = replaced(facts.backward, live={"mm_2": levels["mm_2"] + 500, "mul_1": levels["mul_1"] - 500})
    seen = RegionFacts(facts.forward, backward, facts.peak_bytes + 500)
    found = assumptions_after(LAYERS, SAVING_MM, seen, NOTHING_ASSUMED)
    assert found == Assumptions(backward_bytes=(("mm_2", 500),))
    again = assumptions_after(LAYERS.with_facts(found), SAVING_MM, seen, found)
    assert again == found
    more = replaced(facts.backward, live={"mm_2": levels["mm_2"] + 800})
    seen = RegionFacts(facts.forward, more, facts.peak_bytes + 800)
    assert assumptions_after(LAYERS.with_facts(found), SAVING_MM, seen, found).backward_bytes == (("mm_2", 800),)


def test_a_step_that_is_left_in_registers_is_written_where_that_takes_more() -> None:
    """Of the plan's graphs with the step in memory nothing is known yet, so that nothing else is assumed of its backward."""
    problem = replace(LAYERS, steps=(replace(LAYERS.steps[0], realised=True), *LAYERS.steps[1:]))
    facts = facts_as_simulated(candidate_of(problem, SAVING_MM.saved, ()))
    assert "mul" in facts.backward.stored
    backward = replaced(facts.backward, live={"mm_2": facts.peak_bytes + 500}, at_peak=("mm", "mm_2"), mul=False)
    seen = RegionFacts(facts.forward, backward, facts.peak_bytes + 500)
    plan = replace(SAVING_MM, peak_bytes=facts.peak_bytes)
    found = assumptions_after(problem, plan, seen, NOTHING_ASSUMED)
    assert found == Assumptions(written=("mul",))
    known = problem.with_facts(found)
    assert known.written == ("mul",) and known.steps == problem.steps and known.key() == problem.key()
    again = assumptions_after(known, plan, seen, found)
    assert (again.written, again.stored_again) == (("mul",), ()) and again.backward_bytes
    lower = RegionFacts(facts.forward, backward, facts.peak_bytes)
    assert assumptions_after(problem, plan, lower, NOTHING_ASSUMED).stored_again == (("mul", False),)
    elsewhere = RegionFacts(facts.forward, replace(backward, at_peak=(BufferFacts("mm_2", 1000),)), seen.peak_bytes)
    found = assumptions_after(problem, plan, elsewhere, NOTHING_ASSUMED)
    assert found.written == () and found.stored_again == (("mul", False),) and found.backward_bytes


def test_a_value_that_a_reader_is_written_for_is_written_itself() -> None:
    """Inductor left ``sin`` to its only reader in registers, and wrote ``mul``, which reads both."""
    sin = replace(LAYERS.values[1], realised_again=True)
    problem = replace(LAYERS, values=(LAYERS.values[0], sin, *LAYERS.values[2:]))
    facts = facts_as_simulated(candidate_of(problem, SAVING_MM.saved, ()))
    assert "sin" in facts.backward.stored and "mul" not in facts.backward.stored
    backward = replaced(
        facts.backward, live={"mul": facts.peak_bytes + 500}, at_peak=("mm", "mul"), sin=False, mul=True
    )
    seen = RegionFacts(facts.forward, backward, facts.peak_bytes + 500)
    plan = replace(SAVING_MM, peak_bytes=facts.peak_bytes)
    assert assumptions_after(problem, plan, seen, NOTHING_ASSUMED) == Assumptions(written=("sin",))
    lower = RegionFacts(facts.forward, backward, facts.peak_bytes)
    as_seen = (("mul", True), ("sin", False))
    assert assumptions_after(problem, plan, lower, NOTHING_ASSUMED).stored_again == as_seen
    unrelated = replaced(facts.backward, live={"mul": facts.peak_bytes + 500}, at_peak=("mm", "mul"), sin=False)
    seen = RegionFacts(facts.forward, unrelated, facts.peak_bytes + 500)
    assert assumptions_after(problem, plan, seen, NOTHING_ASSUMED).written == ()


def test_a_kernel_of_many_nodes_is_held_against_the_highest_of_them() -> None:
    facts = simulated()
    levels = {k.nodes[0]: k.live_bytes for k in facts.forward.kernels}
    joined = KernelFacts(("mm", "sin", "cos"), max(levels["mm"], levels["sin"], levels["cos"]) + 300)
    seen = RegionFacts(GraphFacts((joined,), facts.forward.stored), facts.backward, facts.peak_bytes + 300)
    found = assumptions_after(LAYERS, SAVING_MM, seen, NOTHING_ASSUMED)
    assert [nbytes for _, nbytes in found.forward_bytes] == [300]
    (name,) = dict(found.forward_bytes)
    assert levels[name] == max(levels[each] for each in joined.nodes)


def test_a_kernel_of_unknown_nodes_belongs_to_the_higher_of_its_neighbours() -> None:
    """A copy that the code generator made: its bytes are the plan's all the same."""
    facts = simulated()
    levels = {k.nodes[0]: k.live_bytes for k in facts.forward.kernels}
    assert levels["sin"] < levels["cos"]
    copy = KernelFacts(("buf7_copy",), levels["cos"] + 2000)
    kernels = [k for kernel in facts.forward.kernels for k in ([kernel, copy] if "sin" in kernel.nodes else [kernel])]
    seen = RegionFacts(GraphFacts(tuple(kernels), facts.forward.stored), facts.backward, levels["cos"] + 2000)
    found = assumptions_after(LAYERS, SAVING_MM, seen, NOTHING_ASSUMED)
    assert found == Assumptions(forward_bytes=(("cos", 2000),))
    first = RegionFacts(GraphFacts((copy, *facts.forward.kernels), facts.forward.stored), facts.backward, 9999)
    assert dict(assumptions_after(LAYERS, SAVING_MM, first, NOTHING_ASSUMED).forward_bytes).keys() == {"mm"}


@pytest.mark.parametrize("order", ["x a b c", "a x b c", "a b x c"])
def test_a_kernel_that_runs_elsewhere_tells_nothing_of_its_nodes(order: str) -> None:
    """The kernel's node is simulated last.  The bytes in use at the kernel's place are its neighbours', but for the excess."""
    levels = {"a": 100, "b": 900, "c": 300, "x": 50}
    kernels = [KernelFacts((name,), 900 if name == "x" else levels[name]) for name in order.split()]
    assert excess_at_nodes(kernels, levels, 0).get("x") is None
    high = [replace(kernel, live_bytes=1000) if kernel.nodes == ("x",) else kernel for kernel in kernels]
    assert excess_at_nodes(high, levels, 0) == ({"a": 900} if order.startswith("x") else {"b": 100})


@given(st.lists(st.integers(0, 6), max_size=9))
def test_the_longest_ascending_part_is_that_of_all_subsets(numbers: list[int]) -> None:
    def ascends(places: Iterable[int]) -> bool:
        taken = [numbers[place] for place in places]
        return taken == sorted(taken)

    every = range(len(numbers))
    longest = max(n for n in range(len(numbers) + 1) if any(map(ascends, combinations(every, n))))
    found = longest_ascending(numbers)
    assert len(found) == longest and found == sorted(set(found)) and set(found) <= set(every) and ascends(found)


def test_small_bytes_are_not_worth_an_assumption() -> None:
    facts = simulated()
    levels = {k.nodes[0]: k.live_bytes for k in facts.backward.kernels}
    for extra_bytes, expected in ((100, ()), (101, (("mm_2", 101),))):
        backward = replaced(facts.backward, live={"mm_2": levels["mm_2"] + extra_bytes})
        seen = RegionFacts(facts.forward, backward, 1_000_000)
        assert assumptions_after(LAYERS, SAVING_MM, seen, NOTHING_ASSUMED).backward_bytes == expected


def test_a_value_that_is_computed_three_times_is_observed_under_its_own_name() -> None:
    """The graph's second copy has a name that the problem does not have; what is seen of it holds for the value."""
    chosen = Chosen(("mm",), ("sin",))
    found = candidate_of(LAYERS, chosen.saved, chosen.again)
    facts = facts_as_simulated(found)
    (copy,) = [k for k in facts.backward.kernels if k.nodes == ("sin__again",)]
    kernels = tuple(k if k is not copy else KernelFacts(k.nodes, k.live_bytes + 4000) for k in facts.backward.kernels)
    peak_bytes = most_of(kernels)
    seen = RegionFacts(facts.forward, GraphFacts(kernels, facts.backward.stored), peak_bytes)
    assumed = assumptions_after(LAYERS, chosen.plan, seen, NOTHING_ASSUMED)
    assert dict(assumed.backward_bytes).keys() == {"sin"}
    assert peak_bytes_of(LAYERS.with_facts(assumed), chosen.saved, chosen.again) >= peak_bytes


# -- at the peak ------------------------------------------------------------------------------------------------------


def test_the_largest_buffers_at_the_observed_peak_have_their_roles() -> None:
    """The buffers of the graph that has the peak: in the backward, the user's outputs lie beside them."""
    origin = Origin((10, 25), "float32", "layer", "model.py:3")
    problem = replace(LAYERS, values=(replace(LAYERS.values[0], origin=origin), *LAYERS.values[1:]))
    backward = GraphFacts(
        (KernelFacts(("mm_2",), 9000),),
        {},
        (
            BufferFacts("mm", 1001),
            BufferFacts("sin", 1002),
            BufferFacts("mul", 1003),
            BufferFacts("mm_2", 1004),
            BufferFacts("buf9_copy", 1005),
            BufferFacts("mm_2", 1006, is_workspace=True),
        ),
    )
    facts = RegionFacts(GraphFacts((KernelFacts(("mm",), 8999),), {}, (BufferFacts("mm", 7),)), backward, 9000)
    found = largest_at_peak(problem, SAVING_MM, facts, keep=6)
    assert [(b.name, b.nbytes, b.role) for b in found] == [
        ("mm_2", 1006, "workspace"),
        ("buf9_copy", 1005, "temporary"),
        ("mm_2", 1004, "gradient"),
        ("mul", 1003, "temporary"),
        ("sin", 1002, "recomputed"),
        ("mm", 1001, "saved"),
    ]
    assert (found[-1].shape, found[-1].dtype, found[-1].source_line) == ((10, 25), "float32", "model.py:3")
    every = largest_at_peak(problem, SAVING_MM, facts, keep=9)
    assert [(b.name, b.nbytes, b.role) for b in every if b.role == "output"] == [("mm_1", 1000, "output")]
    higher = replace(facts, forward=replace(facts.forward, kernels=(KernelFacts(("mm",), 9001),)))
    assert [(b.name, b.nbytes) for b in largest_at_peak(problem, SAVING_MM, higher)] == [("mm", 7)]
