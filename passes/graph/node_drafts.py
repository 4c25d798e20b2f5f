"""A node of the joint graph while the problem is built: what was read of it, and what the passes of `build` find out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat._torch.codegen_rules import InductorRules, RulesOf
from compile_remat.cost_models import Op, describe
from compile_remat.passes.problem.problem import FREE, Kernel, Pin, Tag


@dataclass(frozen=True)
class Expression:
    """What is computed inside of a fused kernel's expression.

    Attributes:
        reads: Names of the buffers and graph inputs that it loads.
        has_heavy: Whether it has one of `InductorRules.heavy_ops`.
    """

    reads: frozenset[str] = frozenset()
    has_heavy: bool = False


@dataclass(eq=False)
class Draft:
    """A node on its way to become a `Value` or a `Step`; two are equal only where they are one.

    Attributes:
        sources: The drafts that it reads, views seen through.
        input_reads: Names and bytes of the graph inputs that it reads.
        snapshots: Copies of inputs that it reads where the backward runs it.
        is_snapshot: Whether it is such a copy.
        depth: The most unfused kernels on any path that leads to it: what has one depth may be fused.
        mask_factor: How many bytes' worth of time one saved byte costs (`InductorRules.mask_traffic_factor`).
        epilogue_step: The field `late_step` of a `Value`.
        index: Its place among the values or among the steps.
        reads, gradients: The places of the values, and of the steps, that it reads.
        may_differ: Whether a second run may give other numbers.
        unread_bytes: Bytes of those outputs of a node with several that nothing takes.
        own_expression: Of a fused node, the graph inputs that it reads.
        expression: The fused expression that readers in the forward take up.
        backward_expression: The same for readers in the backward, where a value has fewer readers.
        concatenates: Whether it is a buffer that its parts are written into.
        becomes_addmm: Whether it is an addition that Inductor makes an unfused kernel of, with the product that it reads.
        is_always_written: Whether what it becomes or is read by makes it a buffer, whatever its expression.
        is_loaded_again: Whether an unfused kernel of the backward reads it.
        is_materialised: Whether it has a buffer though it is pointwise and no output.
        is_written_again: The same in the backward, with the readers that it has there.
        is_written_if_reused: Whether it is written there only if several read it.
        copied_bytes: Bytes of the copies, in another layout, that live while it runs.
        copied_input_bytes: Bytes of graph inputs that are copied into another layout and last read here.
        copies: Concatenations among its reads that it gets a copy of.
        ordered_by: Sources of a concatenation that have their channels innermost.
        parts: Sources of a concatenation that are written into it.
        inner_time_ns: Of a sliced call, the time of the graphs that it calls.
    """

    node: fx.Node
    op: Op
    kernel: Kernel
    nbytes: int
    sources: tuple[Draft, ...] = ()
    input_reads: tuple[tuple[str, int], ...] = ()
    snapshots: tuple[Draft, ...] = ()
    is_snapshot: bool = False
    in_forward: bool = True
    in_backward: bool = False
    depth: int = 0
    mask_factor: int = 1
    pin: Pin = FREE
    tag: Tag = Tag.NONE
    epilogue_step: int = -1
    index: int = 0
    reads: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    may_differ: bool = False
    unread_bytes: int = 0
    own_expression: Expression = Expression()
    expression: Expression = Expression()
    backward_expression: Expression = Expression()
    is_drawn: bool = False
    concatenates: bool = False
    becomes_addmm: bool = False
    is_always_written: bool = False
    is_loaded_again: bool = False
    is_materialised: bool = False
    is_written_again: bool = False
    is_written_if_reused: bool = False
    is_output: bool = False
    is_channels_last: bool = False
    copied_bytes: int = 0
    copied_input_bytes: int = 0
    copies: list[Draft] = field(default_factory=list)
    ordered_by: list[Draft] = field(default_factory=list)
    parts: list[Draft] = field(default_factory=list)
    time_ns: int = 0
    save_time_ns: int = 0
    inner_time_ns: int = 0


@dataclass
class DraftGraph:
    """All drafts of a joint graph.

    Attributes:
        rules: Of Inductor, for a type of device.
        values: Drafts of what needs no tangent, in the graph's order.
        steps: Drafts of what depends on a tangent, in the graph's order.
        by_node: All drafts, in the graph's order.
        roots: For each node that was read, the nodes whose memory it stands for: itself, what it is a view of, graph inputs.
    """

    joint: joint_graph.Joint
    rules: RulesOf
    values: list[Draft] = field(default_factory=list)
    steps: list[Draft] = field(default_factory=list)
    by_node: dict[fx.Node, Draft] = field(default_factory=dict)
    roots: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)

    @cached_property
    def run_again(self) -> frozenset[fx.Node]:
        """All nodes that the backward may run: what depends on a tangent, and what that is computed from."""
        found = set[fx.Node]()
        for node in reversed(self.joint.module.graph.nodes):
            if node.op != "output" and (node in found or node in self.joint.info.tangents_closure):
                found.add(node)
                found.update(node.all_input_nodes)
        return frozenset(found)

    def add(self, draft: Draft) -> None:
        """Append a draft to its list."""
        self.by_node[draft.node] = draft
        self.roots[draft.node] = (draft.node,)
        among = self.steps if draft.in_backward else self.values
        draft.index = len(among)
        draft.reads = indices_of((*(s for s in draft.sources if not s.in_backward), *draft.snapshots))
        draft.gradients = indices_of(s for s in draft.sources if s.in_backward)
        among.append(draft)

    def roots_of(self, *nodes: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes whose memory these stand for, graph inputs among them, each once."""
        return tuple(dict.fromkeys(root for node in nodes for root in self.roots.get(node, ())))

    def drafts_of(self, *nodes: fx.Node) -> Iterator[Draft]:
        """The drafts whose memory these nodes stand for."""
        return (self.by_node[root] for root in self.roots_of(*nodes) if root in self.by_node)

    def rules_of(self, node: fx.Node) -> InductorRules:
        """Those for the device that the node's value is on."""
        value = node.meta.get("val")
        return self.rules(value.device.type if isinstance(value, torch.Tensor) else "cpu")


def indices_of(drafts: Iterable[Draft]) -> tuple[int, ...]:
    """The places of some values, or of some steps, each once, ascending."""
    return tuple(sorted({draft.index for draft in drafts}))


def copied(graph: DraftGraph) -> DraftGraph:
    """The same drafts anew, just read."""
    made = DraftGraph(graph.joint, graph.rules, roots=graph.roots)
    for node, read in graph.by_node.items():
        draft = made.by_node[node] = copy.copy(read)
        draft.sources = tuple(made.by_node[source.node] for source in read.sources)
        draft.snapshots = tuple(made.by_node[source.node] for source in read.snapshots)
        draft.copies, draft.ordered_by, draft.parts = [], [], []
        (made.steps if draft.in_backward else made.values).append(draft)
    return made


def described(joint: joint_graph.Joint, node: fx.Node) -> Op:
    """`describe`, once for all problems that are built of a joint graph, unless a rewrite changes what the node reads."""
    known = joint.described.get(node)
    if known is None or known[0] is not node.args or known[1] is not node.kwargs:
        known = joint.described[node] = node.args, node.kwargs, describe(node)
    op: Op = known[2]
    return op
