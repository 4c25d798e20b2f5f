"""The hypothesis strategies: programs, and trials of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tests.correctness.harness import weighted_sum
from tests.fuzz.builder import LARGE, SMALL, Builder, Sizes, pointer
from tests.fuzz.program import Program
from tests.fuzz.regions import INSTRUCTIONS
from tests.fuzz.trial import BYTES, Trial
from tests.fuzz.wide import wide

REFUSED = (
    "modified by an inplace operation",
    "backward through the graph a second time",
    "none of output has requires_grad=True",
    "is a view and is being modified inplace",
    "leaf variable has been moved into the graph interior",
)
"""Eager mode's errors for a program that changes a tensor that its backward reads or a view that a user's function made, and for
a reentrant checkpoint whose body reads another value with a gradient, or has none, or writes into a view of a leaf."""

BUDGETS = ("min", "max", 0.5, 0.8, 0.3, 1.0)

INDUCTOR_BUDGETS = ("min", 0.5, "min", 0.5, BYTES, BYTES, "max", 0.8, 0.3)
"""Budgets of compiled programs: few programs are compiled, so budgets that change the most come up most often."""

LOWERED: tuple[tuple[str, int | str], ...] = (
    ("early", "off"),
    ("early", "off"),
    ("end", "auto"),
    ("end", 2),
    ("end", 64),
    ("early", "auto"),
    ("early", 5),
)
"""Values of `gradients` and `slices`."""

MAX_OPS = 14


@st.composite
def programs(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    with_checkpoints: bool = True,
    sizes: Sizes = SMALL,
    *,
    is_wide: bool = False,
) -> Program:
    """Programs; without `with_checkpoints` none has a checkpoint, which only Dynamo can trace.

    With `is_wide` many layers make rows wider.

    At least one output depends on a parameter or a differentiable input.
    """
    torch.manual_seed(0)
    dtype = (["float64"] * 10 + ["float32"] * 2 + ["bfloat16"])[draw(st.integers(0, 12))]
    b = Builder(draw, dtype, with_checkpoints, sizes)
    shape = b.choose(sizes.shapes)
    b.input(shape, role="input" if b.chance(3) else "differentiable")
    b.emit("mul", [b.registers[0].name, b.weight(shape[-1:], b.registers[0].name)])
    count = draw(st.integers(1, MAX_OPS))
    if sizes is LARGE:
        count = max(count, draw(st.integers(1, MAX_OPS)))
    instructions = (wide,) * 8 * is_wide + INSTRUCTIONS
    for _ in range(count):
        b.choose(instructions)(b)
    outputs = _outputs(b)
    program = Program(tuple(b.leaves), tuple(b.body), outputs)
    assume(_can_train(program))
    return program


def _can_train(program: Program) -> bool:
    """True if torch runs the backward, with and without checkpoints; False if a tensor it reads was changed in place."""
    for tried in (program, program.without_checkpoints()):
        try:
            weighted_sum(tried.function()(*tried.tensors())).backward()
        except RuntimeError as error:
            if any(text in str(error) for text in REFUSED):
                return False
            raise
    return True


def _outputs(b: Builder) -> tuple[str, ...]:
    """The newest value with a gradient, and sometimes more: also integers, views, and what needs no gradient."""
    # Torch 2.13 returns wrong gradients for a view that overlaps itself, `aot_eager` and Inductor alike.
    overlapping = {pointer(b[r.name]) for r in b.registers if r.overlaps}
    allowed = [
        r.name for r in reversed(b.registers) if not (b[r.name]._is_view() and pointer(b[r.name]) in overlapping)
    ]
    given = {pointer(b[leaf.name]) for leaf in b.leaves}  # their views are made anew outside of the graph
    trained = [name for name in allowed if b[name].requires_grad and pointer(b[name]) not in given]
    if trained:
        differentiable = b.choose(trained[:2] if b.sizes is LARGE else trained)
    else:
        differentiable = b.emit("mul", [b.pick() or "", b.leaf("parameter", (1,))])[0]
    outputs = [differentiable]
    for _ in range(b.choose((0, 0, 1, 2, 3))):
        name = b.choose(allowed)
        # Torch 2.13 fails, compiled, on a view returned together with one that is detached from it.
        if all(b[name].requires_grad == b[o].requires_grad or pointer(b[name]) != pointer(b[o]) for o in outputs):
            outputs.append(name)
    return tuple(dict.fromkeys(outputs))


@st.composite
def trials(
    draw: Callable[[st.SearchStrategy[Any]], Any], entry: str, compiler: str = "eager", *, is_lowered: bool = False
) -> Trial:
    """A program with the budgets and forced plans that it is run under; those through Dynamo are few, as each compiles.

    With `is_lowered` gradients leave early, rows are computed in slices, or both.
    """
    if is_lowered:
        return _lowered_trial(draw, compiler)
    if compiler == "inductor":
        return _compiled_trial(draw)
    many = entry == "graph"
    program = draw(programs(with_checkpoints=not many))
    budgets = draw(st.lists(st.sampled_from(BUDGETS), min_size=1, max_size=3 if many else 1, unique=True))
    masks = draw(st.lists(st.integers(0, 999), min_size=1, max_size=3 if many else 1, unique=True))
    is_dynamic = draw(st.integers(0, 4)) == 4
    return Trial(program, entry, tuple(budgets), tuple(masks), is_dynamic, compiler)


def _compiled_trial(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Trial:
    """A trial that Inductor compiles: mostly large, under one budget, a few also under a forced plan."""
    program = draw(programs(sizes=LARGE if draw(st.integers(0, 3)) else SMALL))
    budget = draw(st.sampled_from(INDUCTOR_BUDGETS))
    masks = (draw(st.integers(0, 999)),) if draw(st.integers(0, 3)) == 3 else ()
    is_dynamic, losses = draw(st.integers(0, 4)) == 4, 1 + (draw(st.integers(0, 3)) == 3)
    return Trial(program, "dynamo", (budget,), masks, is_dynamic, "inductor", losses)


def _lowered_trial(draw: Callable[[st.SearchStrategy[Any]], Any], compiler: str) -> Trial:
    """A trial that enters through Dynamo under settings which lower the peak further than recomputation does."""
    is_compiled = compiler == "inductor"
    gradients, slices = draw(st.sampled_from(LOWERED))
    sizes = LARGE if is_compiled and draw(st.integers(0, 3)) else SMALL
    is_wide = slices != "off" or draw(st.booleans())
    program = draw(programs(sizes=sizes, is_wide=is_wide))
    if (
        gradients == "early"
    ):  # a leaf that Dynamo returns beside the graph is an error of the step: nobody sees it before
        leaves = {leaf.name for leaf in program.leaves}
        program = replace(program, outputs=tuple(name for name in program.outputs if name not in leaves))
    budgets = INDUCTOR_BUDGETS if is_compiled else BUDGETS
    budget = draw(st.sampled_from(budgets))
    is_dynamic, losses = draw(st.integers(0, 9)) == 9, 1 + (draw(st.integers(0, 5)) == 5)
    steps = gradients == "early" and losses == 1 and draw(st.booleans()) and not _returns_leaves(program)
    return Trial(program, "dynamo", (budget,), (), is_dynamic, compiler, losses, gradients, slices, steps)


def _returns_leaves(program: Program) -> bool:
    """True if an output shares memory with a leaf, which a step in a hook changes before the output is looked at."""
    leaves = program.tensors()
    given = {pointer(leaf) for leaf in leaves}
    return any(pointer(output) in given for output in program.function()(*leaves))
