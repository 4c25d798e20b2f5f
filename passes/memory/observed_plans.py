"""Compares a plan in the simulator with what was observed of its two graphs, and says what the next search is to assume.

An assumption only ever rises: what one plan's graphs write to memory, another plan's are taken to write as well.  So the search
does not go back and forth between plans of which each looks better while the other one is observed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat.passes.memory.candidate_plan import Candidate
from compile_remat.passes.memory.plan_spans import GRADIENT, OUTPUT, RECOMPUTED, SAVED, TEMPORARY
from compile_remat.passes.memory.plan_timeline import candidate_of
from compile_remat.passes.problem.duplication import original
from compile_remat.passes.problem.facts import (
    Assumptions,
    BufferFacts,
    GraphFacts,
    KernelFacts,
    RegionFacts,
)
from compile_remat.passes.problem.plan import Plan
from compile_remat.passes.problem.problem import POINTWISE, Origin, Problem, Step, Value

WORKSPACE = "workspace"

NOTEWORTHY = 1e-4
"""Bytes below this part of the peak are not worth an assumption."""


def assumptions_after(problem: Problem, plan: Plan, facts: RegionFacts, before: Assumptions) -> Assumptions:
    """What to assume in the next search, after a plan was observed.

    In the problem with these assumptions the plan's peak is at least the one that was observed, but for steps that the plan has in
    memory and that were left in registers: what they are computed from stays alive until their last reader.  Where that took more
    than was planned, they are written from now on, and nothing else of the plan's backward is a fact any more.

    Args:
        problem: The one that the plan was found in, `before` among its facts.
        plan: Its names are those of the problem.
    """
    is_first = before.is_empty
    found = candidate_of(problem, plan.saved, plan.again)
    backward_stored = _backward_stored(found, facts.backward)
    stored = replace(
        before,
        stored=_merged(before.stored, _forward_stored(found, facts.forward), is_first),
        stored_again=_merged(before.stored_again, backward_stored, is_first),
    )
    left = {step.name for step in problem.steps if not backward_stored.get(step.name, True)} - set(before.written)
    if left and facts.peak_bytes > plan.peak_bytes:
        again = {name: is_stored for name, is_stored in backward_stored.items() if name not in left}
        written = tuple(sorted({*before.written, *left}))
        return replace(stored, stored_again=_merged(before.stored_again, again, is_first), written=written)
    found = candidate_of(problem.with_facts(stored), plan.saved, plan.again)
    small_bytes = int(NOTEWORTHY * facts.peak_bytes)
    forward = excess_at_nodes(facts.forward.kernels, forward_levels(found), small_bytes)
    backward = _of_originals(found, excess_at_nodes(facts.backward.kernels, backward_levels(found), small_bytes))
    return replace(
        stored,
        forward_bytes=_sums(before.forward_bytes, forward),
        backward_bytes=_sums(before.backward_bytes, backward),
    )


def _merged(
    before: Iterable[tuple[str, bool]], now: Mapping[str, bool], is_first: bool
) -> tuple[tuple[str, bool], ...]:
    rising = {name: is_stored for name, is_stored in now.items() if is_stored or is_first}
    return tuple(sorted((dict(before) | rising).items()))


def _sums(before: Iterable[tuple[str, int]], more: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    known = dict(before)
    return tuple(sorted((known | {name: known.get(name, 0) + nbytes for name, nbytes in more.items()}).items()))


def _forward_stored(found: Candidate, facts: GraphFacts) -> dict[str, bool]:
    """Pointwise values that are not saved, and whether the forward writes them, where the simulator says otherwise."""
    simulator, used = found.simulator, found.batch.used[:, 0]
    computed, assumed = facts.computed, simulator.lifetimes.forward_stored
    return {
        value.name: value.name in facts.stored
        for v, value in enumerate(simulator.problem.values)
        if _may_be_inside(value) and value.name in computed and not used[v] and not value.is_output
        if bool(assumed[v]) != (value.name in facts.stored)
    }


def _backward_stored(found: Candidate, facts: GraphFacts) -> dict[str, bool]:
    """Pointwise values that are computed again, and steps, and whether the backward writes them, where that was not assumed.

    A value that is computed twice there is written if either is.
    """
    simulator, batch, computed = found.simulator, found.batch, facts.computed
    recomputed, buffers = batch.recomputed[:, 0], batch.buffers[:, 0]
    nodes: list[tuple[Value | Step, bool]] = [
        (value, bool(buffers[v])) for v, value in enumerate(simulator.problem.values) if recomputed[v]
    ]
    nodes += [
        (step, is_stored)
        for step, is_stored in zip(simulator.problem.steps, simulator.lifetimes.step_stored, strict=True)
        if not step.is_output
    ]
    stored, differing = dict[str, bool](), set[str]()
    for node, is_assumed in nodes:
        if _may_be_inside(node) and node.name in computed:
            name, is_stored = original(node.name, found.again), node.name in facts.stored
            stored[name] = is_stored or stored.get(name, False)
            differing |= {name} if is_stored != is_assumed else set()
    return {name: stored[name] for name in stored if name in differing}


def _may_be_inside(node: Value | Step) -> bool:
    """Whether a node's buffer is a matter of the kernels around it."""
    return node.kernel == POINTWISE and node.nbytes > 0


def forward_levels(found: Candidate) -> dict[str, int]:
    """Live bytes of the simulated forward at each value's place."""
    forward, batch = found.simulator.forward, found.batch
    live = forward.live(forward.lifetimes(batch.used, batch.recomputed))[0].tolist()
    return {value.name: live[v] for v, value in enumerate(found.simulator.problem.values) if value.in_forward}


def backward_levels(found: Candidate) -> dict[str, int]:
    """Live bytes of the simulated backward at each recomputed value and each step, in the order in which they run."""
    batch, problem = found.batch, found.simulator.problem
    live = batch.live[0].tolist()
    again = np.flatnonzero(batch.recomputed[:, 0]).tolist()
    slots = {problem.values[v].name: int(batch.slots[v, 0]) for v in again}
    slots |= {step.name: int(batch.step_slots[0, b]) for b, step in enumerate(problem.steps)}
    return {name: live[slots[name]] for name in sorted(slots, key=slots.__getitem__)}


def _of_originals(found: Candidate, nbytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes by the names that the problem has: a value that is computed twice in the backward has the larger of both."""
    known: dict[str, int] = {}
    for name, each in nbytes.items():
        name = original(name, found.again)
        known[name] = max(known.get(name, 0), each)
    return known


def excess_at_nodes(kernels: Sequence[KernelFacts], levels: Mapping[str, int], small_bytes: int) -> dict[str, int]:
    """Bytes that were observed above the simulated levels, at the node of each kernel that has the highest of these.

    The code generator may run a kernel at another place than the simulator, among other buffers: an index that nothing forces to be
    early, say.  Their bytes are no property of its nodes, which run elsewhere in another plan.  So such a kernel belongs to one of
    the two nearest that run in their simulated order, to the one of the higher level.  So does a kernel none of whose nodes is in
    the problem, a copy that the code generator made.

    Args:
        levels: In the order in which the simulator runs them.
    """
    places = {name: place for place, name in enumerate(levels)}
    own = [[name for name in kernel.nodes if name in levels] for kernel in kernels]
    in_order = longest_ascending([max(map(places.__getitem__, names), default=None) for names in own])
    anchors = [max(names, key=levels.__getitem__) if k in in_order else None for k, names in enumerate(own)]
    before, after = _latest(anchors), _latest(anchors[::-1])[::-1]
    found: dict[str, int] = {}
    for k, kernel in enumerate(kernels):
        near = [name for name in (before[k], after[k]) if name is not None] or list(levels)[:1]
        node = max(near, key=levels.__getitem__, default=None)
        if node is not None and kernel.live_bytes - levels[node] > small_bytes:
            found[node] = max(found.get(node, 0), kernel.live_bytes - levels[node])
    return found


def _latest(names: Sequence[str | None]) -> list[str | None]:
    """For each place the name there, or else the last one before it."""
    return list(accumulate(names, lambda last, name: name or last))


def longest_ascending(numbers: Sequence[int | None]) -> set[int]:
    """The places of the longest subsequence that never falls, among those that are numbers; of several, one."""
    ends: list[int] = []  # of the subsequences of each length, the place of the smallest last number
    previous: dict[int, int | None] = {}
    for place, number in enumerate(numbers):
        if number is not None:
            length = bisect_right(ends, number, key=numbers.__getitem__)
            previous[place] = ends[length - 1] if length else None
            ends[length : length + 1] = [place]
    found, place_before = set[int](), ends[-1] if ends else None
    while place_before is not None:
        found.add(place_before)
        place_before = previous[place_before]
    return found


def largest_at_peak(problem: Problem, plan: Plan, facts: RegionFacts, keep: int = 5) -> tuple[LiveBuffer, ...]:
    """The largest buffers at the peak that was observed, largest first, with where the model makes them."""
    is_forward = facts.forward.peak_bytes > facts.backward.peak_bytes
    buffers = facts.forward.at_peak if is_forward else facts.backward.at_peak
    values = {value.name: value for value in problem.values}
    nodes: dict[str, Value | Step] = {step.name: step for step in problem.steps} | values
    outputs = () if is_forward else tuple(BufferFacts(v.name, v.nbytes) for v in problem.values if v.is_output)
    found = [_buffer(each, nodes.get(each.node), plan) for each in (*buffers, *outputs)]
    return tuple(sorted(found, key=lambda b: (-b.nbytes, b.name))[:keep])


def _buffer(facts: BufferFacts, node: Value | Step | None, plan: Plan) -> LiveBuffer:
    origin = Origin() if node is None else node.origin
    role = WORKSPACE if facts.is_workspace else _role(node, plan)
    where = origin.shape, origin.dtype, origin.module_path, origin.source_line
    return LiveBuffer(facts.node, facts.nbytes, *where, role)


def _role(node: Value | Step | None, plan: Plan) -> str:
    if isinstance(node, Step):
        return GRADIENT if node.is_output else TEMPORARY
    if node is None:
        return TEMPORARY
    if node.is_output:
        return OUTPUT
    return SAVED if node.name in plan.saved else RECOMPUTED
