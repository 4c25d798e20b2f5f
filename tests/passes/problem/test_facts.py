"""Assumptions about a graph's nodes: as text, in a problem, and the key that they must not change."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_remat.passes.problem.facts import NOTHING_ASSUMED, Assumptions, GraphFacts, KernelFacts, PlainFacts
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE, Problem, Step, Value
from tests.oracles.random_problems import Shape, observed_problems, problems, seeded_problem

NAMES = ["v0", "v1", "v2", "v5", "s0", "s1", "s3", "no_such_node"]


def _sorted_items(found: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(found.items()))


flags = st.dictionaries(st.sampled_from(NAMES), st.booleans(), max_size=4).map(_sorted_items)
sizes = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 1 << 40), max_size=4).map(_sorted_items)
names = st.lists(st.sampled_from(NAMES), max_size=3).map(tuple)
levels = st.lists(st.tuples(st.sampled_from(["", *NAMES]), st.integers(0, 1 << 40)), max_size=3).map(tuple)
plains = st.none() | st.builds(PlainFacts, st.integers(0, 1 << 40), st.integers(0, 1 << 40), levels, levels)
plans = st.lists(st.tuples(names, names), max_size=2).map(tuple)
assumptions = st.builds(Assumptions, flags, flags, sizes, sizes, plains, plans, names)

SMALL = Problem(
    values=(
        Value("mm", 8, EXTERN, (), 5),
        Value("relu", 8, POINTWISE, (0,), 2, realised=True, position=1),
        Value("sin", 8, POINTWISE, (1,), 2, position=2),
    ),
    steps=(
        Step("mul", 8, POINTWISE, (2,), (), 2),
        Step("mm_1", 8, EXTERN, (0,), (0,), 5, is_output=True),
        Step("output", 0, CONSTANT, (), (1,)),
    ),
)


# -- text -------------------------------------------------------------------------------------------------------------


@given(assumptions)
def test_text_gives_the_same_assumptions(assumed: Assumptions) -> None:
    text = assumed.to_text()
    assert text.isascii() and "\n" not in text
    assert Assumptions.from_text(text) == assumed
    assert hash(Assumptions.from_text(text)) == hash(assumed)  # a partitioner's identity


def test_each_part_comes_back_at_its_place() -> None:
    assumed = Assumptions((("a", True),), (("b", False),), (("c", 3),), (("d", 4),))
    assert Assumptions.from_text(assumed.to_text()) == assumed
    assert assumed.to_text().startswith(
        '{"stored":[["a",true]],"stored_again":[["b",false]],"forward_bytes":[["c",3]],'
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[1,2,3,4]",
        '{"another":[]}',
        '{"stored":null}',
        '{"stored":[["a"]]}',
        '{"stored":[["a",1]]}',
        '{"stored":[["a","true"]]}',
        '{"stored":[["a",true,true]]}',
        '{"forward_bytes":[["a",true]]}',
        '{"forward_bytes":[["a",1.5]]}',
        '{"backward_bytes":[[3,1]]}',
        '{"plans":null}',
        '{"plans":[[]]}',
        '{"plans":[[[1],[]]]}',
        '{"plain":[]}',
        '{"plain":{"forward_peak_bytes":1}}',
        '{"plain":{"forward_peak_bytes":1,"peak_bytes":true}}',
        '{"plain":{"forward_peak_bytes":1,"peak_bytes":2,"forward":[[1,2]]}}',
        '{"written":[1]}',
        '{"written":null}',
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_another_text_is_refused(text: str) -> None:
    """`report_cache.recall` takes a file that holds one for damaged."""
    with pytest.raises(ValueError):
        Assumptions.from_text(text)


# -- in a problem -----------------------------------------------------------------------------------------------------


@given(problems)
def test_nothing_assumed_leaves_the_problem_as_it_is(problem: Problem) -> None:
    assert problem.with_facts(NOTHING_ASSUMED) is problem
    assert problem.with_facts(Assumptions(plain=PlainFacts(3, 5))) is problem


def _changed(before: Value | Step, after: Value | Step) -> dict[str, Any]:
    names = [each.name for each in fields(before)]
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


@given(problems | observed_problems, assumptions)
def test_only_the_named_nodes_change_and_only_in_what_is_assumed(problem: Problem, assumed: Assumptions) -> None:
    found = problem.with_facts(assumed)
    stored, again = dict(assumed.stored), dict(assumed.stored_again)
    for before, after in zip(problem.values, found.values, strict=True):
        changed = _changed(before, after)
        inner = before.kernel == POINTWISE
        allowed: set[str] = set()
        allowed |= {"realised", "realised_again"} if inner and before.name in stored else set()
        allowed |= {"realised_again"} if inner and before.name in again else set()
        allowed |= {"observed_forward_bytes"} if before.name in dict(assumed.forward_bytes) else set()
        allowed |= {"observed_bytes"} if before.name in dict(assumed.backward_bytes) else set()
        assert changed.keys() <= allowed
        forward_bytes = dict(assumed.forward_bytes).get(before.name, before.observed_forward_bytes)
        backward_bytes = dict(assumed.backward_bytes).get(before.name, before.observed_bytes)
        assert (after.observed_forward_bytes, after.observed_bytes) == (forward_bytes, backward_bytes)
        if inner and before.name in stored:
            assert after.realised == stored[before.name]
        if inner:  # assumptions about the forward say nothing of the backward
            assert after.is_realised_again == again.get(before.name, before.is_realised_again)
    for step, after_step in zip(problem.steps, found.steps, strict=True):
        inner = step.kernel == POINTWISE
        allowed = {"realised"} if inner and step.name in again else set()
        allowed |= {"observed_bytes"} if step.name in dict(assumed.backward_bytes) else set()
        assert _changed(step, after_step).keys() <= allowed
        assert after_step.observed_bytes == dict(assumed.backward_bytes).get(step.name, step.observed_bytes)
        if inner and step.name in again:
            assert after_step.realised == again[step.name]
    same = {"step_time_ns", "reference", "estimated"}
    assert all(getattr(found, name) == getattr(problem, name) for name in same)


# -- the key ----------------------------------------------------------------------------------------------------------


@given(problems, assumptions, assumptions)
def test_the_key_is_that_of_the_graph_whatever_was_observed(
    problem: Problem, assumed: Assumptions, more: Assumptions
) -> None:
    """The key names pinned plans: with facts in the key, no pinned plan would be found again."""
    key = problem.key()
    once = problem.with_facts(assumed)
    twice = once.with_facts(more)
    assert once.key() == twice.key() == key
    for each in (problem, once, twice):
        read = Problem.from_json(each.to_json())
        assert read == each
        assert read.key() == key


def test_graphs_that_differ_have_keys_that_differ_under_the_same_facts() -> None:
    assumed = Assumptions(stored=(("v0", True),), backward_bytes=(("s0", 4),))
    keys = {seeded_problem(seed, Shape()).with_facts(assumed).key() for seed in range(20)}
    assert len(keys) == len({seeded_problem(seed, Shape()).key() for seed in range(20)}) > 10


def test_a_problem_that_nobody_observed_has_no_key_of_before() -> None:
    assert "key_before_facts" not in SMALL.to_json()
    assert SMALL.key_before_facts == ""
    assumed = Assumptions(forward_bytes=(("mm", 1),))
    assert SMALL.with_facts(assumed).key_before_facts == SMALL.key()


# -- of a graph -------------------------------------------------------------------------------------------------------


def test_what_some_kernel_computes() -> None:
    kernels = (KernelFacts(("a", "b"), 3), KernelFacts((), 9), KernelFacts(("b", "c"), 4))
    assert GraphFacts(kernels, {"c": 4}).computed == {"a", "b", "c"}
    assert GraphFacts((), {}).computed == frozenset()
    assert (GraphFacts(kernels, {}).peak_bytes, GraphFacts((), {}).peak_bytes) == (9, 0)
