"""Drafts: nodes of the joint graph while the problem is built, with the fields that the passes of `build` fill in."""

from __future__ import annotations

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
    """The expression that a fused kernel evaluates for one node.

    Attributes:
        reads: Names of the buffers and graph inputs that the expression loads.
        has_heavy: True if the expression contains one of `InductorRules.heavy_ops`.
    """

    reads: frozenset[str] = frozenset()
    has_heavy: bool = False


@dataclass(eq=False)
class Draft:
    """A node on its way to become a `Value` or a `Step`; drafts are compared by identity.

    Attributes:
        sources: Drafts of the nodes that the node reads, directly or through views.
        input_reads: Name and bytes of each graph input that the node reads.
        snapshots: Drafts of the input copies that the node reads when the backward runs it.
        is_snapshot: True if the node is such a copy of an input.
        depth: The most unfused kernels on any path that leads to the node; nodes of equal depth may be fused.
        mask_factor: Factor on the traffic time of a saved byte (`InductorRules.mask_traffic_factor`).
        epilogue_step: The field `late_step` of a `Value`.
        index: Index of the draft among the values or among the steps.
        reads, gradients: Indices of the values, and of the steps, that the node reads.
        may_differ: True if a second run may give other numbers.
        unread_bytes: Bytes of the outputs of a multi-output node that no node reads.
        own_expression: Of a pointwise node, its own operation and the graph inputs that it loads.
        expression: The fused expression that readers in the forward inline.
        backward_expression: The fused expression that readers in the backward inline; a value has fewer readers there.
        concatenates: True for a concatenation with a buffer into which its sources are written.
        becomes_addmm: True for an addition that Inductor replaces, with the product that it reads, by one unfused kernel.
        is_always_written: True if the node has a buffer whatever its expression, because of its readers or as an ``addmm``.
        is_loaded_again: True if an unfused kernel of the backward reads the node.
        is_materialised: True if the node has a buffer although it is pointwise and no output.
        is_written_again: True if the node has such a buffer in the backward, where it has other readers.
        is_written_if_reused: True if the node has the buffer in the backward only because several nodes read it.
        is_separate: True for a reduction with a kernel of its own: readers of its results load its operands again.
        is_read_in_windows: True if one of `InductorRules.window_readers` reads the node in the graph that the node belongs to.
        is_written_for_reads: True if the node has a buffer only because its expression loads many buffers.
        copied_bytes: Bytes of copies in another layout that are alive while the node's kernel runs.
        copied_input_bytes: Bytes of graph inputs that are copied into another layout and have this node as last reader.
        copies: Concatenations that the node reads through a copy in another layout.
        ordered_by: Sources of a concatenation that have their channels innermost.
        parts: Sources of a concatenation that are written into its buffer.
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
    is_separate: bool = False
    is_written_for_reads: bool = False
    is_read_in_windows: bool = False
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
        rules: Inductor's rules for a type of device.
        values: Drafts of nodes that need no tangent, in the graph's order.
        steps: Drafts of nodes that depend on a tangent, in the graph's order.
        by_node: All drafts, in the graph's order.
        roots: For each node, the nodes or graph inputs whose memory it stands for: the node itself, or the base of a view.
    """

    joint: joint_graph.Joint
    rules: RulesOf
    values: list[Draft] = field(default_factory=list)
    steps: list[Draft] = field(default_factory=list)
    by_node: dict[fx.Node, Draft] = field(default_factory=dict)
    roots: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    _rules_of: dict[fx.Node, InductorRules] = field(default_factory=dict, repr=False)

    @cached_property
    def run_again(self) -> frozenset[fx.Node]:
        """All nodes that the backward may run: nodes that depend on a tangent, and all their direct and indirect inputs."""
        found = set[fx.Node]()
        for node in reversed(self.joint.module.graph.nodes):
            if node.op != "output" and (node in found or node in self.joint.info.tangents_closure):
                found.add(node)
                found.update(node.all_input_nodes)
        return frozenset(found)

    def add(self, draft: Draft) -> None:
        """Append a draft to `values` or `steps`, and set its indices."""
        self.by_node[draft.node] = draft
        self.roots[draft.node] = (draft.node,)
        among = self.steps if draft.in_backward else self.values
        draft.index = len(among)
        draft.reads = indices_of((*(s for s in draft.sources if not s.in_backward), *draft.snapshots))
        draft.gradients = indices_of(s for s in draft.sources if s.in_backward)
        among.append(draft)

    def roots_of(self, *nodes: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes and graph inputs whose memory `nodes` stand for, each once."""
        return tuple(dict.fromkeys(root for node in nodes for root in self.roots.get(node, ())))

    def drafts_of(self, *nodes: fx.Node) -> Iterator[Draft]:
        """The drafts whose memory `nodes` stand for."""
        return (self.by_node[root] for root in self.roots_of(*nodes) if root in self.by_node)

    def rules_of(self, node: fx.Node) -> InductorRules:
        """Inductor's rules for the device of the node's value; the CPU's if the value is no tensor."""
        found = self._rules_of.get(node)
        if found is None:
            value = node.meta.get("val")
            found = self._rules_of[node] = self.rules(value.device.type if isinstance(value, torch.Tensor) else "cpu")
        return found


def indices_of(drafts: Iterable[Draft]) -> tuple[int, ...]:
    """The indices of some values, or of some steps, each once, ascending."""
    return tuple(sorted({draft.index for draft in drafts}))


def copied(graph: DraftGraph) -> DraftGraph:
    """A copy of a graph's drafts, as they were after reading; passes may change the copy."""
    made = DraftGraph(graph.joint, graph.rules, roots=graph.roots, _rules_of=graph._rules_of)
    for node, read in graph.by_node.items():
        draft = made.by_node[node] = Draft.__new__(Draft)
        vars(draft).update(vars(read))  # a fifth of the time of `copy.copy`
        draft.sources = tuple(made.by_node[source.node] for source in read.sources)
        draft.snapshots = tuple(made.by_node[source.node] for source in read.snapshots)
        draft.copies, draft.ordered_by, draft.parts = [], [], []
        (made.steps if draft.in_backward else made.values).append(draft)
    return made


def described(joint: joint_graph.Joint, node: fx.Node) -> Op:
    """`describe`, cached on the joint graph; computed again if a rewrite has changed the node's arguments."""
    known = joint.described.get(node)
    if known is None or known[0] is not node.args or known[1] is not node.kwargs:
        known = joint.described[node] = node.args, node.kwargs, describe(node)
    op: Op = known[2]
    return op
