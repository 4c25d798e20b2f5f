"""Joint graph -> `Problem`: sizes, readers, kernels, prices and pins of every node.

Nodes are read into drafts, in the graph's order, with all fields that are the same under every plan (`read_own`): is_drawn,
concatenates, becomes_addmm and own_expression among them.  Then the passes below run over all drafts.  Each pass reads the node
itself and the fields in the second column, and writes the fields in the third column:

| pass | reads | writes |
|---|---|---|
| `count_reads` | kernel, sources | expressions, is_materialised, is_written_again, is_written_if_reused |
| `mark_channels_last` | kernel, sources, concatenates, is_drawn, is_materialised | is_channels_last |
| `mark_outputs` | | is_output |
| `mark_written_constants` | kernel, sources | kernel |
| `pad_strides` | kernel, concatenates, is_channels_last, is_output | nbytes |
| `drop_fused_buffers` | kernel, depth, becomes_addmm, is_output, is_materialised | is_materialised |
| `mark_layout_copies` | kernel, concatenates, is_channels_last | copied_bytes, copied_input_bytes, copies, ordered_by |
| `mark_parts` | kernel, concatenates, is_output, is_drawn | parts, is_materialised |
| `mark_separate_reductions` | kernel, depth, expressions, is_channels_last | is_separate |
| `price` | kernel, depth, is_separate, is_output, is_materialised, mask_factor | time_ns, save_time_ns |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from compile_remat._torch import conv_layout, joint_graph, sizes
from compile_remat._torch.codegen_rules import InductorRules, RulesOf, inductor_rules
from compile_remat._torch.operators import inner_graphs, tree_leaves
from compile_remat.cost_models import CostModel, Op, OpKind, op_kind
from compile_remat.passes.graph.lowering.channels_last import mark_channels_last, mark_layout_copies
from compile_remat.passes.graph.lowering.materialisation import (
    count_reads,
    drop_fused_buffers,
    is_fused_scatter,
    is_unrolled,
    mark_parts,
    mark_written_constants,
    read_own,
    without_start,
)
from compile_remat.passes.graph.lowering.padded_strides import fill_blocks, pad_strides
from compile_remat.passes.graph.lowering.separate_reductions import mark_separate_reductions
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph, copied, described, indices_of
from compile_remat.passes.graph.origins import numbers_of_regions, origin_of
from compile_remat.passes.graph.outputs import gradient_readers, mark_outputs
from compile_remat.passes.graph.pins import Pins, may_differ, writes_into_input
from compile_remat.passes.graph.pricing import price
from compile_remat.passes.graph.rewrites.early_gradients import copied_bytes
from compile_remat.passes.graph.saved_symints import symints_to_save
from compile_remat.passes.graph.slices.bodies import addition_of
from compile_remat.passes.graph.slices.calls import is_sliced, slices_of, sums_of
from compile_remat.passes.memory.simulator import temporary_bytes
from compile_remat.passes.problem.problem import (
    CONSTANT,
    EXTERN,
    ITEM,
    POINTWISE,
    REDUCTION,
    SAVE,
    SCATTER,
    Kernel,
    Origin,
    Problem,
    Step,
    Tag,
    Value,
)

KERNELS = {
    OpKind.POINTWISE: POINTWISE,
    OpKind.REDUCTION: REDUCTION,
    OpKind.CONSTANT: CONSTANT,
    OpKind.ITEM: ITEM,
    OpKind.MATMUL: EXTERN,
    OpKind.CONV: EXTERN,
    OpKind.ATTENTION: EXTERN,
    OpKind.OTHER: EXTERN,
}

PASSES = (
    count_reads,
    mark_channels_last,
    mark_outputs,
    mark_written_constants,
    pad_strides,
    drop_fused_buffers,
    mark_layout_copies,
    mark_parts,
    mark_separate_reductions,
)
"""Passes that run over the drafts, in this order; see the table above."""

Workspace = Callable[[fx.Node, RulesOf], int]
"""Returns a node's workspace bytes: beside its outputs, while its kernel runs.  The rules give the layout of convolutions."""
BytesOf = Callable[[fx.Node], int]
OriginOf = Callable[[fx.Node], Origin]


def build_problem(
    joint: fx.GraphModule | joint_graph.Joint,
    *,
    num_fwd_outputs: int = 1,
    cost: CostModel,
    reference: Iterable[fx.Node] = (),
    workspace: Workspace = lambda node, rules: 0,
    rules: RulesOf = inductor_rules,
    in_blocks: bool = True,
    expandable: bool = False,
) -> Problem:
    """Build the planning problem of a joint graph.

    Args:
        joint: AOTAutograd's joint graph, prepared here (dead code and CSE, in place) unless it is a `Joint` already.
        num_fwd_outputs: Number of outputs that belong to the forward.
        cost: Prices nodes and fused groups.
        reference: The nodes that torch's own partitioner saves, kept as a candidate plan.
        workspace: Called once for every node that runs an unfused kernel.  For an operator that calls graphs (``cond``, ``scan``),
            the bytes that these graphs allocate count as workspace, too.
        rules: Called once for every type of device that a tensor is on; the device need not be present.  By default the rules of
            the installed Inductor under its present options.
        in_blocks: If True, a buffer counts as the blocks that its device's allocator hands out (`counted_bytes` on CUDA).  If
            False, it counts as its own bytes, which are affine in the batch size.
        expandable: True if torch's CUDA allocator has expandable segments.
    """
    if isinstance(joint, fx.GraphModule):
        joint = joint_graph.prepare(joint, num_fwd_outputs=num_fwd_outputs)
    return ProblemBuilder(joint, cost, workspace, rules, in_blocks, expandable).build(reference)


class ProblemBuilder:
    """Builds the problems of one joint graph, which must not change meanwhile: nodes are read and workspaces are asked for once.

    Takes the arguments of `build_problem`.
    """

    def __init__(
        self,
        joint: joint_graph.Joint,
        cost: CostModel,
        workspace: Workspace = lambda node, rules: 0,
        rules: RulesOf = inductor_rules,
        in_blocks: bool = True,
        expandable: bool = False,
    ) -> None:
        self.cost, self._given_workspace, self._given_rules = cost, workspace, rules
        self._in_blocks, self._expandable = in_blocks, expandable
        self._rules_of = functools.cache(conv_layout.with_layout(rules, joint.module, joint.info.tangents_closure))
        self._read = _read(joint, self._rules_of)
        self._problem_of = functools.cache(self._inner_problem)
        for draft in self._read.by_node.values():
            if is_sliced(draft.node):
                draft.inner_time_ns = self._slices_time_ns(draft.node)
        self._workspace = functools.cache(self._with_inner)
        regions = numbers_of_regions(joint.module.graph)
        self._origin: OriginOf = functools.cache(lambda node: origin_of(node, regions))

    def build(self, reference: Iterable[fx.Node] = ()) -> Problem:
        """See `build_problem`."""
        graph = copied(self._read)  # the passes change drafts
        for run in PASSES:
            run(graph)
        step_time_ns = price(graph.values, graph.steps, self.cost)  # kernels move bytes, not blocks
        if self._in_blocks:
            fill_blocks(graph, expandable=self._expandable)
        return _problem(graph, reference, self._workspace, self._origin, step_time_ns)

    def saved_by(self, nodes: Iterable[fx.Node], problem: Problem) -> tuple[int, ...]:
        """Indices of the values of `problem` that are saved if `nodes` are saved; for a view, the value that it is a view of."""
        return _saved_by(self._read, nodes, problem.values)

    def _with_inner(self, node: fx.Node) -> int:
        """The workspace of a node in bytes: the most of its kernel, its gradient copy, and the graphs that its operator calls."""
        found = max(self._given_workspace(node, self._rules_of), copied_bytes(node))
        for module in inner_graphs(node):
            inner = self._problem_of(module)
            handed = sum(sizes.storage_nbytes(n.meta["val"]) for n in _returned(module)) if is_sliced(node) else 0
            found = max(found, temporary_bytes(inner) + handed)
        return found

    def _slices_time_ns(self, node: fx.Node) -> int:
        """Time in ns of all graph calls that a sliced call makes."""
        module, *others = inner_graphs(node)
        calls = slices_of(node) - len(others)
        parts = _returned(module)[-len(sums) :] if (sums := sums_of(node)) else []
        additions = [addition_of(total, part.meta["val"]) for total, part in zip(sums, parts, strict=True)]
        time_ns = sum(self._problem_of(addition).step_time_ns for addition in additions) * (slices_of(node) - 1)
        return time_ns + sum(self._problem_of(body).step_time_ns for body in ([module] * calls + others))

    def _inner_problem(self, module: fx.GraphModule) -> Problem:
        body = joint_graph.copied_graph(module)
        for k, given in enumerate(body.graph.find_nodes(op="placeholder")):
            given.target = f"primals_{k}"  # some inputs of a backward's body are named tangents
        return build_problem(
            body,
            num_fwd_outputs=len(tree_leaves(body.graph.output_node().args)),
            cost=self.cost,
            workspace=self._given_workspace,
            rules=self._given_rules,
            in_blocks=self._in_blocks,
            expandable=self._expandable,
        )


def _returned(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.output_node().all_input_nodes


# -- nodes -> drafts --------------------------------------------------------------------------------------------------


def _read(joint: joint_graph.Joint, rules: RulesOf) -> DraftGraph:
    """Drafts of all nodes that compute something; views, sizes and graph inputs have no draft."""
    graph, pins, closure = DraftGraph(joint, rules), Pins(joint, rules), joint.info.tangents_closure
    given_symints = frozenset(symints_to_save(joint)) | closure
    copies = {copy.node for copy in joint.snapshots}
    is_past_tangents = False  # from the first node, even a view, that depends on a tangent, torch keeps graph order
    for node in joint.module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            graph.roots[node] = (node,)
            continue
        if node.op == "output":
            continue
        if node in copies:
            graph.add(_snapshot_draft(joint, node))
            continue
        is_past_tangents |= node in closure
        op = described(joint, node)
        pin, tag = pins.read(node, op)
        roots = graph.roots_of(*node.all_input_nodes)
        if op.kind is OpKind.SYMBOL:
            # To read a size that is not saved, the backward has to compute the tensor.
            graph.roots[node] = () if node in given_symints else tuple(r for r in roots if r in graph.by_node)
        elif op.kind is OpKind.VIEW or (op.kind is OpKind.ITEM and node.all_input_nodes[0] not in graph.by_node):
            graph.roots[node] = roots
            if joint_graph.must_be_in_forward(node):  # `extract` saves the view, and so the memory of its root
                for draft in graph.drafts_of(node):
                    draft.pin, draft.tag = SAVE, Tag.NONE
        else:
            draft = _kernel_draft(graph, node, op, roots)
            draft.pin, draft.tag = pin, tag
            is_in_epilogue = is_past_tangents and not draft.in_forward and not draft.in_backward
            draft.epilogue_step = len(graph.steps) if is_in_epilogue else -1
            graph.add(draft)
    read_own(graph)
    return graph


def _kernel_draft(graph: DraftGraph, node: fx.Node, op: Op, roots: Sequence[fx.Node]) -> Draft:
    """The draft of a node that is no view; all its sources have drafts already, and the caller sets its pin.

    Args:
        roots: The nodes and graph inputs that the node reads, directly or through views.
    """
    joint, rules = graph.joint, graph.rules_of(node)
    draft = Draft(
        node=node,
        op=op,
        kernel=_kernel_of(node, op.kind, rules),
        nbytes=0 if writes_into_input(node) else _nbytes(node),
        sources=tuple([graph.by_node[r] for r in roots if r in graph.by_node]),
        snapshots=tuple([graph.by_node[copy] for copy in joint.snapshots_for(node)]),
        input_reads=tuple([(r.name, _nbytes(r)) for r in roots if r not in graph.by_node]),
        in_forward=joint.info.is_required_fw(node),
        in_backward=node in joint.info.tangents_closure,
        mask_factor=rules.mask_traffic_factor if _is_mask(node) else 1,
        may_differ=may_differ(node, op),
        unread_bytes=_unread_bytes(node),
    )
    draft.sources = without_start(draft)
    draft.depth = max((s.depth + (s.kernel in (EXTERN, SCATTER)) for s in draft.sources), default=0)
    return draft


def _snapshot_draft(joint: joint_graph.Joint, node: fx.Node) -> Draft:
    """The draft of an input's copy: pinned to be saved if the backward needs it, and read by no node of the forward."""
    return Draft(
        node=node,
        op=described(joint, node),
        kernel=POINTWISE,
        nbytes=_nbytes(node),
        in_forward=False,
        pin=SAVE,
        is_snapshot=True,
    )


def _kernel_of(node: fx.Node, kind: OpKind, rules: InductorRules) -> Kernel:
    if is_fused_scatter(node, rules):
        return SCATTER
    return POINTWISE if kind is OpKind.REDUCTION and is_unrolled(node, rules) else KERNELS[kind]


def _nbytes(node: fx.Node) -> int:
    return sizes.storage_nbytes(node.meta.get("val"))


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


# -- drafts -> problem ------------------------------------------------------------------------------------------------


def _problem(
    graph: DraftGraph, reference: Iterable[fx.Node], workspace: BytesOf, origin: OriginOf, step_time_ns: int
) -> Problem:
    values, steps = _values(graph, workspace, origin), _steps(graph, workspace, origin)
    returned = list(graph.drafts_of(*graph.joint.bwd_outputs))
    last = Step("output", 0, CONSTANT, _values_among(returned), indices_of(d for d in returned if d.in_backward))
    estimated = sorted({draft.op.target for draft in graph.by_node.values() if draft.op.estimated})
    return Problem(values, (*steps, last), step_time_ns, _saved_by(graph, reference, values), tuple(estimated))


def _saved_by(graph: DraftGraph, nodes: Iterable[fx.Node], values: Sequence[Value]) -> tuple[int, ...]:
    return tuple(i for i in _values_among(graph.drafts_of(*nodes)) if values[i].is_saveable)


def _values(graph: DraftGraph, workspace: BytesOf, origin: OriginOf) -> tuple[Value, ...]:
    positions = _positions(graph.values)
    readers = gradient_readers(graph, {draft: draft.index for draft in graph.steps})
    return tuple(
        Value(
            name=draft.node.name,
            nbytes=draft.nbytes,
            kernel=draft.kernel,
            reads=draft.reads,
            time_ns=draft.time_ns,
            save_time_ns=draft.save_time_ns,
            pin=draft.pin,
            tag=draft.tag,
            in_forward=draft.in_forward,
            is_output=draft.is_output,
            realised=draft.is_materialised,
            may_differ=draft.may_differ,
            is_snapshot=draft.is_snapshot,
            position=position,
            late_step=draft.epilogue_step,
            transient_bytes=draft.unread_bytes + draft.copied_bytes,
            is_channels_last=draft.is_channels_last,
            workspace_bytes=workspace(draft.node) if draft.kernel == EXTERN else 0,
            held_bytes=draft.copied_input_bytes,
            copies=_values_among(draft.copies),
            parts=_values_among(draft.parts),
            ordered_by=_values_among(draft.ordered_by),
            gradient_readers=readers.get(draft.node, ()) if draft.is_output else (),
            origin=origin(draft.node),
        )
        for draft, position in zip(graph.values, positions, strict=True)
    )


def _steps(graph: DraftGraph, workspace: BytesOf, origin: OriginOf) -> list[Step]:
    return [
        Step(
            name=draft.node.name,
            nbytes=draft.nbytes,
            kernel=draft.kernel,
            reads=draft.reads,
            gradients=draft.gradients,
            time_ns=draft.time_ns,
            is_output=draft.is_output,
            realised=draft.is_materialised,
            transient_bytes=draft.unread_bytes + draft.copied_bytes,
            is_channels_last=draft.is_channels_last,
            workspace_bytes=workspace(draft.node) if draft.kernel == EXTERN else 0,
            held_bytes=draft.copied_input_bytes,
            copies=_values_among(draft.copies),
            origin=origin(draft.node),
        )
        for draft in graph.steps
    ]


def _values_among(drafts: Iterable[Draft]) -> tuple[int, ...]:
    return indices_of(draft for draft in drafts if not draft.in_backward)


def _positions(values: Sequence[Draft]) -> list[int]:
    """Position of each value in a forward order in which values that only the backward needs stand right after their sources."""
    keys: list[tuple[int, ...]] = []
    for i, draft in enumerate(values):
        if draft.in_forward or draft.is_snapshot:  # a snapshot stands before its first reader
            keys.append((i,))
        else:
            keys.append((*max((keys[j] for j in draft.reads), default=(-1,)), i))
    ranks = {key: rank for rank, key in enumerate(sorted(keys))}
    return [ranks[key] for key in keys]


def _unread_bytes(node: fx.Node) -> int:
    """Bytes of the outputs of a multi-output node that no getitem reads."""
    value = node.meta.get("val")
    if not isinstance(value, list | tuple):
        return 0
    read = {u.args[1] for u in node.users if op_kind(u) is OpKind.ITEM}
    return sum(sizes.storage_nbytes(v) for i, v in enumerate(value) if i not in read)
