"""Compares a plan's simulation with the facts observed of its two graphs, and returns the assumptions for the next search.

An assumption only ever rises: a node that one plan's graphs write to memory counts as written in every other plan.  So the search
does not alternate between two plans, each of which looks better while the other plan is observed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat.passes.memory.candidate_plan import Candidate
from compile_remat.passes.memory.on_host import live_on_device
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
from compile_remat.passes.problem.plan import Offloaded, Plan
from compile_remat.passes.problem.problem import POINTWISE, Origin, Problem, Step, Value

WORKSPACE = "workspace"

NOTEWORTHY = 1e-4
"""Excess bytes below this fraction of the peak cause no assumption."""


def assumptions_after(problem: Problem, plan: Plan, facts: RegionFacts, before: Assumptions) -> Assumptions:
    """Assumptions for the next search, after a plan was observed.

    In the problem with these assumptions, the plan's peak is at least the observed peak.  There is one exception: nodes that the
    plan has in memory, that Inductor left in registers, and that explain a buffer at the peak.  Such a step keeps its inputs alive
    until its last reader, and for such a recomputed value Inductor may write a larger reader instead.  If the observed peak exceeds
    the plan's peak, these nodes are written from now on, and the excess bytes and the readers written instead are dropped from this
    observation.

    Args:
        problem: The problem that the plan was found in, with `before` among its facts.
        plan: The observed plan, in names of `problem`.
    """
    is_first = before.is_empty
    found = candidate_of(problem, plan.saved, plan.again)
    backward_stored = _backward_stored(found, facts.backward)
    stored = replace(
        before,
        stored=_merged(before.stored, _forward_stored(found, facts.forward), is_first),
        stored_again=_merged(before.stored_again, backward_stored, is_first),
    )
    left, instead = _left_in_registers(problem, backward_stored, facts)
    left -= set(before.written)
    if left and facts.peak_bytes > plan.peak_bytes:
        again = {name: is_stored for name, is_stored in backward_stored.items() if name not in left | instead}
        written = tuple(sorted({*before.written, *left}))
        return replace(stored, stored_again=_merged(before.stored_again, again, is_first), written=written)
    found = candidate_of(problem.with_facts(stored), plan.saved, plan.again)
    small_bytes = int(NOTEWORTHY * facts.peak_bytes)
    forward_levels, backward_levels = levels_by_node(found, plan.offloaded)
    forward = excess_at_nodes(facts.forward.kernels, forward_levels, small_bytes)
    backward = _of_originals(found, excess_at_nodes(facts.backward.kernels, backward_levels, small_bytes))
    return replace(
        stored,
        forward_bytes=_sums(before.forward_bytes, forward),
        backward_bytes=_sums(before.backward_bytes, backward),
    )


def _left_in_registers(
    problem: Problem, backward_stored: Mapping[str, bool], facts: RegionFacts
) -> tuple[set[str], set[str]]:
    """Nodes that the simulator has in memory and Inductor in registers, if that explains a buffer at the peak.

    The buffer is an input of such a step, which lives until the step's last reader, or it is a reader of such a recomputed value:
    Inductor writes a node whose expression reads too many buffers.

    Args:
        backward_stored: See `_backward_stored`.

    Returns:
        These nodes, and the readers at the peak that the simulator has in registers.
    """
    backward, left, instead = facts.backward, set[str](), set[str]()
    if facts.forward.peak_bytes >= facts.peak_bytes:
        return left, instead
    at_peak = {buffer.node for buffer in backward.at_peak if not buffer.is_workspace}
    loads: dict[str, frozenset[str]] = {}  # for each node in registers: the buffers that its expression reads
    values: dict[str, frozenset[str]] = {}  # and the values in it that the simulator has in memory
    nodes: tuple[Value | Step, ...] = (*problem.values, *problem.steps)
    for node in nodes:
        name = node.name
        if node.kernel != POINTWISE or name not in backward.computed:
            continue
        sources = [problem.values[v].name for v in node.reads]
        sources += [problem.steps[b].name for b in node.gradients] if isinstance(node, Step) else []
        within = frozenset[str]().union(*(values.get(source, ()) for source in sources))
        if name in backward.stored:
            if within and backward_stored.get(name, False) and name in at_peak:
                instead.add(name)
                left |= within
            continue
        loads[name] = frozenset[str]().union(*(loads.get(source, {source}) for source in sources))
        is_left = not backward_stored.get(name, True)
        values[name] = within | {name} if is_left and isinstance(node, Value) else within
        if is_left and isinstance(node, Step) and loads[name] & at_peak:
            left.add(name)
    return left, instead


def _merged(
    before: Iterable[tuple[str, bool]], now: Mapping[str, bool], is_first: bool
) -> tuple[tuple[str, bool], ...]:
    rising = {name: is_stored for name, is_stored in now.items() if is_stored or is_first}
    return tuple(sorted((dict(before) | rising).items()))


def _sums(before: Iterable[tuple[str, int]], more: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    known = dict(before)
    return tuple(sorted((known | {name: known.get(name, 0) + nbytes for name, nbytes in more.items()}).items()))


def _forward_stored(found: Candidate, facts: GraphFacts) -> dict[str, bool]:
    """Maps unsaved pointwise values to True if the forward writes them, where the simulator assumed the contrary."""
    simulator, used = found.simulator, found.batch.used[:, 0]
    computed, assumed = facts.computed, simulator.lifetimes.forward_stored
    return {
        value.name: value.name in facts.stored
        for v, value in enumerate(simulator.problem.values)
        if _may_be_inside(value) and value.name in computed and not used[v] and not value.is_output
        if bool(assumed[v]) != (value.name in facts.stored)
    }


def _backward_stored(found: Candidate, facts: GraphFacts) -> dict[str, bool]:
    """Maps recomputed pointwise values and steps to True if the backward writes them, where the simulator assumed the contrary.

    A value that the backward computes twice counts as written if either copy is written.
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
    """Returns whether the node may be fused into a kernel and so have no buffer."""
    return node.kernel == POINTWISE and node.nbytes > 0


def levels_by_node(found: Candidate, offloaded: Sequence[Offloaded] = ()) -> tuple[dict[str, int], dict[str, int]]:
    """Maps nodes to the simulated live bytes while they run: the values of the forward, then what the backward runs, in order.

    Args:
        found: The plan with all values kept.
        offloaded: The saved values that it moves to the host.
    """
    live, batch, problem = live_on_device(found, offloaded), found.batch, found.simulator.problem
    forward = {value.name: int(live.forward[v]) for v, value in enumerate(problem.values) if value.in_forward}
    slots = {problem.values[v].name: int(batch.slots[v, 0]) for v in np.flatnonzero(batch.recomputed[:, 0]).tolist()}
    slots |= {step.name: int(batch.step_slots[0, b]) for b, step in enumerate(problem.steps)}
    backward = {name: int(live.backward[slots[name]]) for name in sorted(slots, key=slots.__getitem__)}
    return forward, backward


def _of_originals(found: Candidate, nbytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes by the problem's own names; a value that the backward computes twice gets the larger of both figures."""
    known: dict[str, int] = {}
    for name, each in nbytes.items():
        name = original(name, found.again)
        known[name] = max(known.get(name, 0), each)
    return known


def excess_at_nodes(kernels: Sequence[KernelFacts], levels: Mapping[str, int], small_bytes: int) -> dict[str, int]:
    """Maps nodes to the bytes observed above their simulated level.  A kernel's excess goes to its node of the highest level.

    The code generator may run a kernel at another place than the simulator, among other buffers: for example, an index that
    nothing forces to be early.  The bytes of these buffers are no property of the kernel's nodes, which run elsewhere in another
    plan.  So the excess of such a kernel goes to one of the two nearest nodes that run in simulated order, the node of the higher
    level.  The same holds for a kernel without a node of the problem: a copy that the code generator made.

    Args:
        levels: Simulated live bytes of each node, in the order in which the simulator runs the nodes.
    """
    places = {name: place for place, name in enumerate(levels)}
    own = [[name for name in kernel.nodes if name in levels] for kernel in kernels]
    known = [k for k, names in enumerate(own) if names]
    in_order = longest_ascending([max(places[name] for name in own[k]) for k in known])
    anchors: list[str | None] = [None] * len(own)
    for k in (known[place] for place in in_order):
        anchors[k] = max(own[k], key=levels.__getitem__)
    before, after = _latest(anchors), _latest(anchors[::-1])[::-1]
    found: dict[str, int] = {}
    for k, kernel in enumerate(kernels):
        near = [name for name in (before[k], after[k]) if name is not None] or list(levels)[:1]
        node = max(near, key=levels.__getitem__, default=None)
        if node is not None and kernel.live_bytes - levels[node] > small_bytes:
            found[node] = max(found.get(node, 0), kernel.live_bytes - levels[node])
    return found


def _latest(names: Sequence[str | None]) -> list[str | None]:
    """For each place, the name there, or else the last name before that place."""
    latest: list[str | None] = []
    for name in names:
        latest.append(name or (latest[-1] if latest else None))
    return latest


def longest_ascending(numbers: Sequence[int]) -> list[int]:
    """The places, in order, of a longest subsequence that never falls."""
    ends: list[int] = []  # for each length, the place where the subsequence with the smallest last number ends
    previous: list[int | None] = []
    for place, number in enumerate(numbers):
        length = bisect_right(ends, number, key=lambda end: numbers[end])
        previous.append(ends[length - 1] if length else None)
        ends[length : length + 1] = [place]
    found = list[int]()
    last = ends[-1] if ends else None
    while last is not None:
        found.append(last)
        last = previous[last]
    return found[::-1]


def largest_at_peak(problem: Problem, plan: Plan, facts: RegionFacts, keep: int = 5) -> tuple[LiveBuffer, ...]:
    """The `keep` largest buffers at the observed peak, largest first, with their origin in the model."""
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
