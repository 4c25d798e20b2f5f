"""The problem in which some values have a copy each, for the backward."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from compile_remat.passes.problem.duplication import original, with_copies
from compile_remat.passes.problem.problem import Problem, Step, Value
from tests.oracles.random_problems import problems

OF_VALUES = ("reads", "copies", "ordered_by", "parts")
OF_STEPS = ("gradients", "gradient_readers")


def names(problem: Problem, node: Value | Step, field: str) -> list[str]:
    """The names of the nodes whose indices are in a field."""
    nodes: tuple[Value | Step, ...] = problem.steps if field in OF_STEPS else problem.values
    return [nodes[i].name for i in getattr(node, field)]


def test_all_fields_with_indices_are_known_here() -> None:
    for kind in (Value, Step):
        tuples = {f.name for f in fields(kind) if str(f.type) == "tuple[int, ...]"}
        assert tuples <= {*OF_VALUES, *OF_STEPS}


@given(problems, st.integers(0, 2**12 - 1))
def test_indices_stand_for_what_they_stood_for(problem: Problem, bits: int) -> None:
    again = [v.name for k, v in enumerate(problem.values) if bits >> k & 1]
    copied = with_copies(problem, again)
    for field in (*OF_VALUES, *OF_STEPS):
        for before in (*problem.values, *problem.steps):
            for after in (*copied.values, *copied.steps):
                if hasattr(before, field) and original(after.name, again) == before.name:
                    found = [original(name, again) for name in names(copied, after, field)]
                    assert found == names(problem, before, field), (after.name, field)
