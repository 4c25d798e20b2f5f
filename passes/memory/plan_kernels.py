"""The kernels of one plan, each with the buffers that it reads and writes: what `Simulator` knows of them, graph by graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from compile_remat.passes.memory.buffers import Bools, Ints
from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, ITEM, POINTWISE, REDUCTION, SCATTER, Step, Value

Node = Value | Step


@dataclass(eq=False)
class Buffer:
    """The memory of one node.

    Attributes:
        is_given: Saved by the forward, and there when the backward begins.
        is_returned: There until the graph ends.
        over: The buffer that it is written over.
        is_handed_on: Whether another one is written over it.
        may_stay_inside: Whether it is not written where all that reads it is fused with its kernel.
    """

    node: Node
    nbytes: int
    is_given: bool = False
    is_returned: bool = False
    over: Buffer | None = None
    is_handed_on: bool = False
    may_stay_inside: bool = False


@dataclass(eq=False)
class Kernel:
    """A node that runs by itself, or that Inductor's scheduler has as a node of its own.

    Attributes:
        slot: Where it stands in the simulator's order.
        elements: How many the loops of a fused kernel run over; 0 for an unfused one.
    """

    node: Node
    slot: int
    elements: int
    reads: set[Buffer]
    writes: list[Buffer] = field(default_factory=list)

    @property
    def is_unfused(self) -> bool:
        """Whether nothing is fused with it."""
        return self.elements == 0


@dataclass(frozen=True)
class KernelGraph:
    """One graph under one plan.

    Attributes:
        kernels: In the simulator's order.
        other_bytes: At each slot, live bytes that are no node's buffer: workspaces, copies, outputs and gradients of the caller.
    """

    kernels: Sequence[Kernel]
    buffers: Sequence[Buffer]
    other_bytes: Ints


def forward_kernels(simulator: Simulator, saved: Bools) -> KernelGraph:
    """The forward of the plan that saves the values in `saved`, [values]; what is computed to be saved stands behind the rest."""
    forward, values = simulator.forward, simulator.problem.values
    if not values:
        return KernelGraph((), (), np.zeros(1, dtype=np.int64))
    schedule = simulator.schedules.of(saved[:, None])
    used = schedule.used
    found = forward.lifetimes(used, schedule.recomputed, with_epilogue=False)
    others = forward.live(found)[0].copy()
    buffers: dict[int, Buffer] = {}
    for v, value in enumerate(values):
        is_own = bool(forward.stored[v])
        if value.nbytes and (is_own or found.saved[v, 0]):
            begin = int(forward.begin[v]) if is_own else int(forward.begins_if_saved[v])
            others[begin : int(found.stops[v, 0]) if is_own else None] -= value.nbytes
            buffers[v] = Buffer(value, value.nbytes, is_returned=bool(used[v, 0]) or value.is_output)
    kernels: dict[int, Kernel] = {}
    for v, value in enumerate(values):
        if value.kernel != ITEM and (v in buffers or (value.in_forward and value.kernel in (EXTERN, REDUCTION))):
            reads = _read_by(value, values, buffers)
            kernels[v] = Kernel(value, v, _elements(value, [values[u] for u in value.reads]), reads)
        maker = _maker(v, value)
        if v in buffers and maker in kernels:
            kernels[maker].writes.append(buffers[v])
    return KernelGraph(tuple(kernels.values()), tuple(buffers.values()), others)


def backward_kernels(simulator: Simulator, saved: Bools) -> KernelGraph:
    """The backward of the plan that saves the values in `saved`, [values]."""
    batch, values, steps = simulator.one(saved), simulator.problem.values, simulator.problem.steps
    step_slots = batch.step_slots[0].tolist()
    others = batch.live[0, : step_slots[-1] + 1].copy()
    of_value = _value_buffers(simulator, saved, others)
    of_step = _step_buffers(simulator, step_slots, others)
    by_value: dict[int, Kernel] = {}
    for v in np.flatnonzero(batch.recomputed[:, 0]).tolist():
        value = values[v]
        if value.kernel != ITEM and (v in of_value or value.kernel in (EXTERN, REDUCTION)):
            elements = _elements(value, [values[u] for u in value.reads])
            by_value[v] = Kernel(value, int(batch.slots[v, 0]), elements, _read_by(value, values, of_value))
        maker = _maker(v, value)
        if v in of_value and maker in by_value and not of_value[v].is_given:
            by_value[maker].writes.append(of_value[v])
    by_step: dict[int, Kernel] = {}
    for b, step in enumerate(steps):
        if step.kernel != ITEM and (b in of_step or step.kernel in (EXTERN, REDUCTION)):
            read: list[Node] = [*(values[u] for u in step.reads), *(steps[g] for g in step.gradients)]
            reads = _read_by_step(step, simulator, of_value, of_step)
            by_step[b] = Kernel(step, step_slots[b], _elements(step, read), reads)
        maker = int(simulator.step_item_of[b])
        if b in of_step and maker in by_step:
            by_step[maker].writes.append(of_step[b])
    kernels = sorted([*by_value.values(), *by_step.values()], key=lambda kernel: kernel.slot)
    return KernelGraph(tuple(kernels), tuple(dict.fromkeys([*of_value.values(), *of_step.values()])), others)


def _value_buffers(simulator: Simulator, saved: Bools, others: Ints) -> dict[int, Buffer]:
    """Buffers of values in the backward; their bytes are taken off `others`, [slots]."""
    values, model = simulator.problem.values, simulator.lifetimes
    schedule = simulator.schedules.of(saved[:, None])
    lifetimes, recomputed = model.of(schedule), schedule.recomputed[:, 0]
    found: dict[int, Buffer] = {}
    for v in np.flatnonzero(lifetimes.alive[:, 0] & (simulator.nbytes > 0)).tolist():
        is_given, value = not lifetimes.buffers[v, 0], values[v]
        others[0 if is_given else lifetimes.begins[v, 0] : lifetimes.ends[v, 0] + 1] -= value.nbytes
        may_stay_inside = not is_given and value.kernel == POINTWISE and value.is_realised_again
        found[v] = Buffer(value, value.nbytes, is_given, may_stay_inside=may_stay_inside)
    for w, parts in model.parts:  # written into the concatenation
        found |= {v: found[w] for v in parts if w in found and recomputed[v] and v not in found}
    return found


def _step_buffers(simulator: Simulator, step_slots: Sequence[int], others: Ints) -> dict[int, Buffer]:
    """Buffers of steps; their bytes are taken off `others`, [slots]."""
    steps, model = simulator.problem.steps, simulator.lifetimes
    found: dict[int, Buffer] = {}
    for b, step in enumerate(steps):
        nbytes, last = int(model.step_bytes[b]), int(model.step_last[b])
        if nbytes:
            is_returned = last >= len(steps)
            stop = None if is_returned else step_slots[last] + 1 - int(model.step_in_place[b])
            others[step_slots[simulator.step_item_of[b]] : stop] -= nbytes
            may_stay_inside = not is_returned and step.kernel == POINTWISE and step.realised
            found[b] = Buffer(step, nbytes, is_returned=is_returned, may_stay_inside=may_stay_inside)
    return found


def _maker(v: int, value: Value) -> int:
    """The value whose kernel writes a value's buffer."""
    return value.reads[0] if value.kernel == ITEM and value.reads else v


def _read_by(node: Node, values: Sequence[Value], buffers: Mapping[int, Buffer]) -> set[Buffer]:
    """Buffers of values that a node's kernel reads, through values that stay in registers."""
    found, seen, stack = set[Buffer](), set[int](), list(node.reads)
    while stack:
        u = stack.pop()
        if u in buffers:
            found.add(buffers[u])
        elif u not in seen:
            seen.add(u)
            stack += values[u].reads if values[u].kernel == POINTWISE else ()
    return found


def _read_by_step(
    step: Step, simulator: Simulator, of_value: Mapping[int, Buffer], of_step: Mapping[int, Buffer]
) -> set[Buffer]:
    """Buffers that a step's kernel reads, through values and steps that stay in registers."""
    values, steps = simulator.problem.values, simulator.problem.steps
    found, seen, stack = _read_by(step, values, of_value), set[int](), list(step.gradients)
    while stack:
        g = stack.pop()
        if g in of_step:
            found.add(of_step[g])
        elif g not in seen:
            seen.add(g)
            if steps[g].kernel == POINTWISE:
                found |= _read_by(steps[g], values, of_value)
                stack += steps[g].gradients
    return found


def _elements(node: Node, read: Iterable[Node]) -> int:
    """What the loops of a fused kernel run over: a reduction over what it reads, a scatter over what it adds."""
    if node.kernel == EXTERN:
        return 0
    own = max(1, prod(node.origin.shape))
    if node.kernel == SCATTER:
        return max((prod(r.origin.shape) for r in read if r.kernel != CONSTANT), default=own)
    return max([own, *(prod(r.origin.shape) for r in read)]) if node.kernel == REDUCTION else own
