"""Removes the copies of inputs from a problem, for a graph whose backward may read every input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from compile_remat.passes.problem.problem import Problem, Step, Value

_Node = TypeVar("_Node", Value, Step)

INDICES = ("reads", "copies", "ordered_by", "parts")
"""Fields of a `Value` or a `Step` that hold indices of values."""


def has_snapshots(problem: Problem) -> bool:
    """Returns whether the problem has a copy of an input, because the backward may not read the input itself."""
    return any(value.is_snapshot for value in problem.values)


def without_snapshots(problem: Problem) -> Problem:
    """Returns the problem without copies of inputs, for inputs that do not change before the backward (`inputs="constant"`).

    The result equals the problem that is built from the graph under this setting, and has the same key.
    """
    if not has_snapshots(problem):
        return problem
    kept = [k for k, value in enumerate(problem.values) if not value.is_snapshot]
    new = {old: number for number, old in enumerate(kept)}
    place = {position: k for k, position in enumerate(sorted(problem.values[k].position for k in kept))}
    values = tuple(replace(_reading(problem.values[k], new), position=place[problem.values[k].position]) for k in kept)
    steps = tuple(_reading(step, new) for step in problem.steps)
    return replace(problem, values=values, steps=steps, reference=tuple(new[k] for k in problem.reference if k in new))


def _reading(node: _Node, new: Mapping[int, int]) -> _Node:
    names = (name for name in INDICES if hasattr(node, name))
    fields: dict[str, Any] = {name: tuple(new[k] for k in getattr(node, name) if k in new) for name in names}
    return replace(node, **fields)
