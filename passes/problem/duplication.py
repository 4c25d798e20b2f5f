"""Problems in which a plan can compute some values a third time: each of these has a second copy, which the backward reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from compile_remat.passes.problem.problem import ITEM, RECOMPUTE, Problem, Step, Value

SUFFIX = "__again"

Node = TypeVar("Node", Value, Step)


def original(name: str, names: Collection[str]) -> str:
    """Name of the original value that `name` stands for, in a problem with copies of the values in `names`."""
    base = name.removesuffix(SUFFIX)
    return base if base in names else name


def with_copies(problem: Problem, names: Collection[str]) -> Problem:
    """Returns the problem in which each named value is followed by a copy, which the backward reads instead of the value.

    A copy reads the copies of its inputs, where these exist.  A plan cannot save a copy.
    """
    values, wanted = problem.values, frozenset(names)
    is_copied = np.array([v.name in wanted for v in values], dtype=bool)
    own = np.arange(len(values)) + np.cumsum(is_copied) - is_copied
    order = np.argsort([v.position for v in values], kind="stable")
    position = np.empty(len(values), dtype=np.int64)
    position[order] = np.arange(len(values)) + np.cumsum(is_copied[order]) - is_copied[order]
    read_copy = (own + is_copied).tolist()
    read_own, places = own.tolist(), position.tolist()
    unread = _unread_by_copies(values, is_copied)
    made: list[Value] = []
    for v, value in enumerate(values):
        reads, copies = _moved(value.reads, read_own), _moved(value.copies, read_own)
        parts = _moved(value.parts, read_own)
        ordered_by = _moved(value.ordered_by, read_own)  # only originals are saved
        changes = {"reads": reads, "copies": copies, "ordered_by": ordered_by, "parts": parts}
        made.append(_with(value, position=places[v], **changes))
        if is_copied[v]:
            made.append(
                _with(
                    value,
                    name=value.name + SUFFIX,
                    reads=_moved(value.reads, read_copy),
                    copies=_moved(value.copies, read_copy),
                    ordered_by=ordered_by,
                    parts=_moved(value.parts, read_copy),
                    position=places[v] + 1,
                    pin=RECOMPUTE,
                    in_forward=False,
                    is_output=False,
                    transient_bytes=value.transient_bytes + unread.get(v, 0),
                )
            )
    steps = tuple(
        _with(
            step,
            reads=_moved(step.reads, read_copy),
            copies=_moved(step.copies, read_copy),
        )
        for step in problem.steps
    )
    return replace(problem, values=tuple(made), steps=steps, reference=_moved(problem.reference, read_own))


def _moved(indices: tuple[int, ...], places: Sequence[int]) -> tuple[int, ...]:
    return tuple([places[v] for v in indices]) if indices else ()


def _with(node: Node, **changes: Any) -> Node:
    """Like `dataclasses.replace`, whose check of each field took most of the time here."""
    made = object.__new__(type(node))
    vars(made).update(vars(node), **changes)
    return made


def _unread_by_copies(values: Sequence[Value], is_copied: npt.NDArray[np.bool_]) -> dict[int, int]:
    """Maps kernels with several outputs to the bytes of their outputs without a copy: a copy of the kernel writes these unread."""
    found: dict[int, int] = {}
    for v, value in enumerate(values):
        if value.kernel == ITEM and value.reads and not is_copied[v]:
            found[value.reads[0]] = found.get(value.reads[0], 0) + value.nbytes
    return found
