"""All that can be drawn next, regions with instructions of their own included."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.fuzz.builder import Builder, Register
from tests.fuzz.instructions import (
    along,
    binary,
    buffers,
    casting,
    detached,
    in_place,
    indexing,
    joined,
    parts,
    random_numbers,
    reduction,
    shapes,
    unary,
)
from tests.fuzz.layers import attention, convolution, linear, norm, pooling, products
from tests.fuzz.program import Op

MAX_BODY = 4


def region(b: Builder) -> None:
    """Some instructions in a checkpoint, a loop, or without gradient."""
    x = b.pick(lambda t: t.requires_grad)
    kinds = ["loop", "no_grad", "autocast", *(["checkpoint"] * 3 if b.with_checkpoints else [])]
    kind = b.choose(kinds)
    if x is None or b.regions:
        return unary(b)
    outer, registers, shape, dtype = b.body, list(b.registers), b[x].shape, b[x].dtype
    carried = f"c{b.count}"
    b.count += 1
    b.body = []
    b.regions.append(kind)
    b.environment[carried] = b[x]
    b.registers.append(Register(carried, len(b.regions) - 1, frozen=True))
    cast = torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")
    with torch.set_grad_enabled(kind != "no_grad"), cast:
        for _ in range(b.choose(range(1, MAX_BODY + 1))):
            b.choose(INSTRUCTIONS)(b)
        last = b.pick(lambda t: True)
        assert last is not None
        if kind == "loop" and not (last == b.registers[-1].name and b[last].shape == shape and b[last].dtype == dtype):
            last = b.emit("fold", [carried, last])[0]
        elif b.body[-1].out != last:
            last = b.emit("sin", [last])[0]
    attrs = {"loop": [b.choose((2, 3))], "checkpoint": [b.chance(3)]}.get(kind, [])
    name = f"v{b.count}"
    b.count += 1
    op = Op(name, kind, (carried, x), tuple(attrs), tuple(b.body))
    b.regions.pop()
    b.body = [*outer, op]
    b.registers = registers + [
        r for r in b.registers if r.name in {leaf.name for leaf in b.leaves} and r not in registers
    ]
    if kind == "checkpoint":
        b.checkpointed |= {x, *(arg for inner in op.walk() for arg in inner.args if arg in b.environment)}
    b.environment[name] = b[last] if kind != "no_grad" else b[last].detach()
    b.registers.append(Register(name, len(b.regions), frozen=kind == "no_grad"))
    return None


def graph_break(b: Builder) -> None:
    """A place at which Dynamo ends a graph."""
    x = b.pick()
    if b.regions or x is None:
        return unary(b)
    # A name for what is there, which stays as it was: no write through the new one.
    b.emit("graph_break", [x])
    b.registers[-1].frozen = True
    return None


INSTRUCTIONS: tuple[Callable[[Builder], None], ...] = (
    unary,
    linear,
    binary,
    products,
    shapes,
    reduction,
    along,
    joined,
    parts,
    norm,
    attention,
    convolution,
    pooling,
    in_place,
    in_place,
    random_numbers,
    random_numbers,
    buffers,
    indexing,
    casting,
    detached,
    region,
    region,
    graph_break,
)
