"""Table of a plan's nodes: the bytes that the planner assumed beside the bytes observed in the plan's two graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from compile_remat._util.text_table import format_table
from compile_remat._util.units import format_bytes
from compile_remat.passes.memory.observed_plans import levels_by_node
from compile_remat.passes.memory.plan_spans import Span, backward_spans, forward_spans
from compile_remat.passes.memory.plan_timeline import candidate_of
from compile_remat.passes.problem.facts import GraphFacts, RegionFacts
from compile_remat.passes.problem.plan import Plan
from compile_remat.passes.problem.problem import Problem

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class NodeFacts:
    """One node of a plan's forward or backward.

    Attributes:
        graph: `forward` or `backward`.
        node: Name of the node; a recomputed value has the same name in both graphs.
        assumed_bytes, observed_bytes: Bytes of the node's buffer; 0 if the node stays in registers or is unknown on that side.
        assumed_live_bytes, observed_live_bytes: Bytes in use while the node is computed; None if the node was not simulated, or
            no observed kernel computes it.
    """

    graph: str
    node: str
    assumed_bytes: int
    observed_bytes: int
    assumed_live_bytes: int | None = None
    observed_live_bytes: int | None = None

    @property
    def differs(self) -> bool:
        """True if the assumed and the observed bytes of the buffer differ."""
        return self.assumed_bytes != self.observed_bytes


class NodeTable(tuple[NodeFacts, ...]):
    """The nodes of a plan in execution order, forward first; ``str`` formats them as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        heads = ("graph", "node", "assumed", "observed", "live, assumed", "live, observed")
        return format_table("", heads, [_cells(row) for row in self], "llrrrr")


def node_facts(problem: Problem, plan: Plan, facts: RegionFacts) -> NodeTable:
    """Rows of the nodes that have a buffer in the simulated plan or the observed graphs, or that the simulator runs.

    Args:
        problem: The problem that the plan was found in.
    """
    found = candidate_of(problem, plan.saved, plan.again)
    spans = forward_spans(found.simulator, found.batch), backward_spans(found.simulator, found.batch)
    made = {span.node.name for span in spans[0]}
    own = _buffers(spans[0]), _buffers(span for span in spans[1] if span.begin > 0 or span.node.name not in made)
    levels = levels_by_node(found, plan.offloaded)
    graphs = zip((FORWARD, BACKWARD), own, levels, (facts.forward, facts.backward), strict=True)
    return NodeTable(row for graph in graphs for row in _rows(*graph))


def _buffers(spans: Iterable[Span]) -> dict[str, int]:
    return {span.node.name: span.nbytes for span in spans}


def _rows(graph: str, buffers: Mapping[str, int], levels: Mapping[str, int], facts: GraphFacts) -> Iterator[NodeFacts]:
    """Rows of one graph: first the nodes that observed kernels compute, in kernel order, then the other nodes."""
    live = {name: kernel.live_bytes for kernel in reversed(facts.kernels) for name in kernel.nodes}
    ran = [name for kernel in facts.kernels for name in kernel.nodes]
    for name in dict.fromkeys([*ran, *facts.stored, *levels, *buffers]):
        if name in buffers or name in facts.stored or name in levels:
            stored = buffers.get(name, 0), facts.stored.get(name, 0)
            yield NodeFacts(graph, name, *stored, levels.get(name), live.get(name))


def _cells(row: NodeFacts) -> list[str]:
    numbers = row.assumed_bytes, row.observed_bytes, row.assumed_live_bytes, row.observed_live_bytes
    return [row.graph, row.node, *("-" if n is None else format_bytes(n) for n in numbers)]
