"""The planning problem as data: JSON, the key that plans are stored under, and what may be saved."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given

from compile_remat.passes.problem.problem import (
    CONSTANT,
    EXTERN,
    KERNELS_OWN,
    POINTWISE,
    RECOMPUTE,
    REDUCTION,
    SAVE,
    SCHEMA,
    Origin,
    Problem,
    Step,
    Value,
)
from tests.oracles.random_problems import problems

ORIGIN = Origin((2, 3), "float32", "block.0", "model.py:7")
TINY = Problem(
    values=(
        Value("mm", 24, EXTERN, (), 5, origin=ORIGIN),
        Value("relu", 24, POINTWISE, (0,), 2, save_time_ns=3, position=1),
    ),
    steps=(
        Step("threshold", 24, POINTWISE, (1,), (), 2),
        Step("mm_1", 48, EXTERN, (0,), (0,), 5, is_output=True, origin=ORIGIN),
        Step("output", 0, CONSTANT, (), (1,)),
    ),
    step_time_ns=14,
    reference=(0,),
)

OTHER_VALUE: dict[str, Any] = {
    "name": "addmm",
    "nbytes": 25,
    "kernel": REDUCTION,
    "reads": (),
    "time_ns": 3,
    "save_time_ns": 4,
    "pin": SAVE,
    "tag": "must_save",
    "in_forward": False,
    "is_output": True,
    "realised": True,
    "position": 2,
    "late_step": 1,
    "transient_bytes": 8,
}
"""For each field of a value another content than that of `TINY`'s second value."""

OTHER_STEP: dict[str, Any] = {
    "name": "addmm",
    "nbytes": 25,
    "kernel": REDUCTION,
    "reads": (1,),
    "gradients": (),
    "time_ns": 3,
    "is_output": False,
    "realised": True,
    "transient_bytes": 8,
}
"""The same for `TINY`'s second step."""


def with_value(**changes: Any) -> Problem:
    first, second = TINY.values
    return replace(TINY, values=(first, replace(second, **changes)))


def with_step(**changes: Any) -> Problem:
    first, second, last = TINY.steps
    return replace(TINY, steps=(first, replace(second, **changes), last))


# -- JSON -------------------------------------------------------------------------------------------------------------


@given(problems)
def test_json_round_trip(problem: Problem) -> None:
    again = Problem.from_json(problem.to_json())
    assert again == problem
    assert again.key() == problem.key()


def test_json_keeps_every_field() -> None:
    """The random problems have neither origins nor a reference, and equality alone would not tell a list apart."""
    text = replace(TINY, values=(TINY.values[0], replace(TINY.values[1], **{**OTHER_VALUE, "reads": (0,)}))).to_json()
    again = Problem.from_json(text)
    assert again.to_json() == text
    assert (again.values[0].origin, again.steps[1].origin) == (ORIGIN, ORIGIN)
    assert (again.step_time_ns, again.reference) == (14, (0,))
    assert hash(again) == hash(Problem.from_json(text))  # tuples all the way down


@pytest.mark.parametrize("schema", [None, 0, SCHEMA + 1, str(SCHEMA)])
def test_another_schema_is_refused(schema: object) -> None:
    data = {**json.loads(TINY.to_json()), "schema": schema}
    with pytest.raises(ValueError, match=f"not a problem of schema {SCHEMA}"):
        Problem.from_json(json.dumps(data))


# -- the key ----------------------------------------------------------------------------------------------------------


def test_key_golden() -> None:
    """The key names plan files: if the key changes, stored plans are lost, which `SCHEMA` or the notes must say."""
    assert TINY.key() == "8708be0f5fcb9151"


def test_key_ignores_where_a_node_comes_from() -> None:
    elsewhere = Origin((4,), "bfloat16", "head", "other.py:1")
    assert with_value(origin=elsewhere) != TINY != with_step(origin=elsewhere)
    assert TINY.key() == with_value(origin=elsewhere).key() == with_step(origin=elsewhere).key()


def test_the_tables_name_every_field() -> None:
    assert set(OTHER_VALUE) == {f.name for f in fields(Value)} - {"origin"} - KERNELS_OWN
    assert set(OTHER_STEP) == {f.name for f in fields(Step)} - {"origin"} - KERNELS_OWN


@pytest.mark.parametrize("name", sorted(OTHER_VALUE))
def test_key_changes_with_a_value(name: str) -> None:
    assert with_value(**{name: OTHER_VALUE[name]}).key() != TINY.key()


@pytest.mark.parametrize("name", sorted(OTHER_STEP))
def test_key_changes_with_a_step(name: str) -> None:
    assert with_step(**{name: OTHER_STEP[name]}).key() != TINY.key()


def test_key_ignores_how_the_code_runs_a_node() -> None:
    """Another processor takes other workspaces, and finds the plan nevertheless."""
    assert with_value(workspace_bytes=5, is_channels_last=True).key() == TINY.key() == with_step(held_bytes=7).key()


def test_key_changes_with_the_number_of_nodes() -> None:
    fewer = (replace(TINY, values=TINY.values[:1]), replace(TINY, steps=TINY.steps[1:]))
    assert len({TINY.key(), *(p.key() for p in fewer)}) == 3


# -- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "saveable"),
    [
        ({}, True),
        ({"pin": SAVE}, True),
        ({"pin": RECOMPUTE}, False),
        ({"nbytes": 0}, False),
        ({"kernel": CONSTANT}, False),
    ],
)
def test_what_may_be_saved(changes: dict[str, Any], saveable: bool) -> None:
    assert with_value(**changes).values[1].is_saveable is saveable
