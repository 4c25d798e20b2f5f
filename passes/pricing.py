"""Prices of single nodes from the price of fused groups.

A plan's time must be a sum over its nodes, so that a cut, a linear bound and a local search can all use it.  So a fused
kernel's memory traffic is shared out: the first node of a fused group that reads a buffer pays for reading it, the node
whose result goes to memory pays for writing it, and what stays in registers costs its arithmetic alone.  Nodes
that fuse are those with equally many unfused kernels before them (`Draft.depth`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_remat.cost_models import CostModel, Op
from compile_remat.passes.problem import EXTERN, POINTWISE, REDUCTION


@dataclass
class Draft:
    """What a price depends on.

    Attributes:
        sources: The drafts that it reads, views seen through.
        input_reads: Names and bytes of the graph inputs that it reads.
        depth: The most unfused kernels on any path that leads to it.
    """

    op: Op
    kernel: str
    nbytes: int
    sources: tuple[Draft, ...]
    input_reads: tuple[tuple[str, int], ...]
    in_forward: bool
    in_backward: bool
    depth: int = 0
    realised: bool = False
    is_output: bool = False
    time_ns: int = 0
    save_time_ns: int = 0


def price(values: Sequence[Draft], steps: Sequence[Draft], cost: CostModel) -> int:
    """Set `time_ns` of all and `save_time_ns` of the values; returns the time of a step that recomputes nothing."""
    forward_stored, backward_stored = _stored_sets(values, steps)
    seen: set[tuple[int | str, int]] = set()
    for draft in (*values, *steps):
        stored = id(draft) in (forward_stored if draft.in_forward else backward_stored)
        draft.time_ns = _time(draft, stored, forward_stored | backward_stored, seen, cost)
    step_time_ns = sum(d.time_ns for d in (*values, *steps))
    for draft in values:
        if draft.kernel == POINTWISE and id(draft) not in backward_stored and id(draft) in forward_stored:
            write = cost.traffic_time_ns(draft.nbytes)
            draft.time_ns = max(0, draft.time_ns - write)  # once more, it stays in registers
        draft.save_time_ns = _save_time(draft, forward_stored, backward_stored, cost)
    return step_time_ns


def _stored_sets(values: Sequence[Draft], steps: Sequence[Draft]) -> tuple[set[int], set[int]]:
    """Nodes with a buffer in the forward, and those with one when the backward computes them."""
    forward = {id(d) for d in values if d.kernel != POINTWISE or d.realised or d.is_output}
    backward = {
        id(d) for d in (*values, *steps) if d.kernel != POINTWISE or d.realised or (d.in_backward and d.is_output)
    }
    for draft in values:
        if draft.kernel == EXTERN:
            forward.update(id(s) for s in draft.sources)
    for draft in steps:
        if draft.kernel == EXTERN:
            backward.update(id(s) for s in draft.sources)
    return forward, backward


def _time(draft: Draft, stored: bool, buffers: set[int], seen: set[tuple[int | str, int]], cost: CostModel) -> int:
    if draft.kernel == EXTERN:
        return cost.op_time_ns(draft.op)
    if draft.kernel not in (POINTWISE, REDUCTION):
        return 0
    read = 0
    for source in draft.sources:
        key = (id(source), draft.depth)
        if id(source) in buffers and key not in seen:
            seen.add(key)
            read += source.nbytes
    for name, nbytes in draft.input_reads:
        if (name, draft.depth) not in seen:
            seen.add((name, draft.depth))
            read += nbytes
    traffic = cost.traffic_time_ns(read + (draft.nbytes if stored else 0))
    launch = cost.launch_time_ns if stored else 0
    return launch + max(cost.arithmetic_time_ns(draft.op), traffic)


def _save_time(draft: Draft, forward_stored: set[int], backward_stored: set[int], cost: CostModel) -> int:
    """Traffic of a saved value that recomputing would spare: its write in the forward, its read by fused readers."""
    if draft.kernel != POINTWISE:
        return 0
    write = 0 if id(draft) in forward_stored else cost.traffic_time_ns(draft.nbytes)
    read = 0 if id(draft) in backward_stored else cost.traffic_time_ns(draft.nbytes)
    return write + read
