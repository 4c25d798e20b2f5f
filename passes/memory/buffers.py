"""Inductor's rules for buffers, node by node: the nodes with a buffer in memory, and the kernels that can reuse a buffer in place.

The rules are read from torch 2.13's ``graph.py`` (realisation of values that extern kernels read or that gather too many reads)
and ``scheduler.py`` (``decide_inplace_update``).  Inductor never allocates a buffer that one fused kernel alone uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.problem.problem import EXTERN, ITEM, POINTWISE, REDUCTION, SCATTER, Step, Value

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def readers_of(values: Sequence[Value]) -> list[list[int]]:
    readers: list[list[int]] = [[] for _ in values]
    for w, value in enumerate(values):
        for v in value.reads:
            readers[v].append(w)
    return readers


def is_always_stored(node: Value | Step) -> bool:
    return node.nbytes > 0 and (node.kernel in (EXTERN, REDUCTION, SCATTER, ITEM) or node.realised)


def is_always_stored_again(value: Value) -> bool:
    """Like `is_always_stored`, for a value that the backward recomputes."""
    return value.nbytes > 0 and ((value.kernel != POINTWISE and is_always_stored(value)) or value.is_realised_again)


def overwrites(node: Value | Step) -> bool:
    return node.kernel == POINTWISE and node.nbytes > 0


def may_be_written_over(node: Value | Step, by: Value | Step) -> bool:
    """Returns whether the kernel of `by` can reuse `node`'s buffer in place: equal bytes, equal layout, written by one kernel."""
    return node.nbytes == by.nbytes and node.is_channels_last == by.is_channels_last and node.kernel != SCATTER


def sources_in_place(values: Sequence[Value], stored: Sequence[bool]) -> list[tuple[int, list[int]]]:
    """Pointwise values, each with the values of its size whose buffers its kernel reads in some plan and could reuse in place."""
    pairs = []
    for w, value in enumerate(values):
        if overwrites(value):
            path = register_path(value.reads, values, stored)
            sources = [v for v in path if may_be_written_over(values[v], value) and not values[v].is_output]
            if sources:
                pairs.append((w, sources))
    return pairs


def register_path(reads: Iterable[int], values: Sequence[Value], stored: Sequence[bool]) -> list[int]:
    """Indices of the values in `reads`, and of the values that these read through fused (not stored) values, ascending."""
    stack = list(reads)
    seen = set(stack)
    while stack:
        v = stack.pop()
        if values[v].kernel == POINTWISE and not stored[v]:
            new = set(values[v].reads) - seen
            seen |= new
            stack += new
    return sorted(seen)


def stored_steps(steps: Sequence[Step]) -> list[bool]:
    stored = [is_always_stored(s) or (s.is_output and s.nbytes > 0) for s in steps]
    for step in steps:
        if step.kernel == EXTERN:
            for g in step.gradients:
                stored[g] = stored[g] or steps[g].nbytes > 0
    return stored


def effective_ends(steps: Sequence[Step], stored: Sequence[bool]) -> list[int]:
    """For each step, the last step whose kernel reads the step's inputs: the step itself, or the last reader it is fused into."""
    ends = list(range(len(steps)))
    last = len(steps) - 1
    for b in range(len(steps) - 1, -1, -1):
        for g in steps[b].gradients:
            if b == last:
                continue
            if not stored[g] and steps[g].kernel == POINTWISE:
                ends[g] = max(ends[g], ends[b])
    return ends


def register_reads(b: int, steps: Sequence[Step], stored: Sequence[bool]) -> list[int]:
    """Indices of the values that the kernel of step `b` reads, directly or through fused steps."""
    found: list[int] = []
    stack, seen = [b], set[int]()
    while stack:
        g = stack.pop()
        if g not in seen:
            seen.add(g)
            found += steps[g].reads
            stack += [x for x in steps[g].gradients if not stored[x] and steps[x].kernel == POINTWISE]
    return found


def step_buffers(steps: Sequence[Step], stored: Sequence[bool], ends: Sequence[int]) -> tuple[Ints, Ints, Ints]:
    """Returns three arrays, [steps]: each buffer's bytes, its last reading step, and 1 if that step reuses the buffer in place.

    The last reading step of a buffer that is never freed is the number of steps.
    """
    m = len(steps)
    nbytes = np.array([s.nbytes if stored[b] else 0 for b, s in enumerate(steps)], dtype=np.int64)
    last, in_place = list(range(m)), [0] * m
    for b, step in enumerate(steps):
        for g in step.gradients:
            last[g] = max(last[g], ends[b])
    for b, step in enumerate(steps):
        if step.is_output:
            last[b] = m
    for b, step in enumerate(steps):
        if overwrites(step) and stored[b]:
            for g in register_gradients(b, steps, stored):
                if last[g] == b and stored[g] and not in_place[g] and may_be_written_over(steps[g], step):
                    in_place[g] = 1
                    break
    return nbytes, np.array(last, dtype=np.int64), np.array(in_place, dtype=np.int64)


def register_gradients(b: int, steps: Sequence[Step], stored: Sequence[bool]) -> list[int]:
    """Indices of the steps whose results the kernel of step `b` reads, directly or through fused steps."""
    found, seen = list[int](), set[int]()
    stack = list(reversed(steps[b].gradients))
    while stack:
        g = stack.pop()
        if g in seen:
            continue
        seen.add(g)
        if stored[g] or steps[g].kernel != POINTWISE:
            found.append(g)
        else:
            stack.extend(reversed(steps[g].gradients))
    return found
