"""Joint graph -> `Problem`: sizes, readers, kernels, prices and pins of every node; the only pass that reads FX meta."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from compile_remat._torch import conv_layout, joint_graph
from compile_remat._torch.inductor_rules import InductorRules, RulesOf, inductor_rules
from compile_remat.cost_models import CostModel, OpKind, describe
from compile_remat.passes.graph.pins import Pins, may_differ, writes_into_input
from compile_remat.passes.graph.pricing import Draft, price
from compile_remat.passes.graph.rewrites.addmm import becoming_addmm
from compile_remat.passes.graph.saved_symints import handed_over
from compile_remat.passes.graph.views import is_reshape, is_reshaped, most_users, shape
from compile_remat.passes.problem.problem import (
    CONSTANT,
    EXTERN,
    FREE,
    ITEM,
    POINTWISE,
    REDUCTION,
    SAVE,
    Origin,
    Pin,
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

NEVER_FUSED = -1
"""Stands for the depth of a kernel that nothing is fused with."""

Workspace = Callable[[fx.Node], int]
"""Bytes that a node's kernel takes beside its outputs while it runs."""

NO_REGIONS: Mapping[int | None, int] = {}

_SOURCE_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def build_problem(
    joint: fx.GraphModule | joint_graph.Joint,
    *,
    num_fwd_outputs: int = 1,
    cost: CostModel,
    reference: Iterable[fx.Node] = (),
    workspace: Workspace = lambda node: 0,
    rules: RulesOf = inductor_rules,
) -> Problem:
    """Read a joint graph.

    Args:
        joint: AOTAutograd's joint graph, prepared here (dead code and CSE, in place) unless it is a `Joint` already.
        num_fwd_outputs: How many of its outputs belong to the forward.
        cost: Prices nodes and fused groups.
        reference: The nodes that torch's own chooser saves, kept as a candidate plan.
        workspace: Asked once for every node that runs an unfused kernel.
        rules: Asked once for every type of device that a tensor is on, which need not be here.  By default those of the
            installed Inductor under its present options.
    """
    if isinstance(joint, fx.GraphModule):
        joint = joint_graph.prepare(joint, num_fwd_outputs=num_fwd_outputs)
    return _Builder(joint, cost, workspace, functools.cache(rules)).build(reference)


@dataclass
class _Draft(Draft):
    """A node on its way to become a `Value` or a `Step`."""

    node: fx.Node = field(kw_only=True)
    joint_index: int = field(kw_only=True)
    pin: Pin = FREE
    tag: Tag = Tag.NONE
    is_output: bool = False
    late_step: int = -1
    gathered: frozenset[str] = frozenset()
    concatenates: bool = False
    has_heavy: bool = False
    is_drawn: bool = False
    is_channels_last: bool = False
    held_bytes: int = 0
    copied_bytes: int = 0
    copies: list[fx.Node] = field(default_factory=list)
    ordered_by: list[fx.Node] = field(default_factory=list)
    parts: list[fx.Node] = field(default_factory=list)


class _Builder:
    def __init__(self, joint: joint_graph.Joint, cost: CostModel, workspace: Workspace, rules: RulesOf) -> None:
        self.joint, self.cost, self.workspace, self.rules = joint, cost, workspace, rules
        self.values: list[_Draft] = []
        self.steps: list[_Draft] = []
        self.drafts: dict[fx.Node, _Draft] = {}
        self.roots: dict[fx.Node, tuple[fx.Node, ...]] = {}  # nodes whose memory a node stands for, inputs among them
        self.pins = Pins(joint)
        self.is_past_tangents = (
            False  # from the first node that a tangent reaches, even a view, torch walks in graph order
        )
        self.handed_over = frozenset(handed_over(joint))
        regions = (joint_graph.region_of(n) for n in joint.module.graph.nodes)
        found = dict.fromkeys(r for r in regions if r is not None)
        self.regions: dict[int | None, int] = {r: k for k, r in enumerate(found, start=1)}
        self.addmms = becoming_addmm(n for n in joint.module.graph.nodes if n in joint.info.tangents_closure)

    def build(self, reference: Iterable[fx.Node]) -> Problem:
        for index, node in enumerate(self.joint.module.graph.nodes):
            if node.op in ("placeholder", "get_attr"):
                self.roots[node] = (node,)
            elif node.op != "output":
                self.is_past_tangents |= node in self.joint.info.tangents_closure
                self._add(node, index)
        self._mark_outputs()
        self._mark_written_constants()
        self._mark_realised()
        self._mark_copied_inputs()
        self._mark_parts()
        step_time_ns = price(self.values, self.steps, self.cost)
        index_of = {d.node: i for i, d in enumerate(self.values)}
        step_of = {d.node: i for i, d in enumerate(self.steps)}
        positions = _positions(self.values, index_of)
        self.gradient_readers = self._gradient_readers(step_of)
        values = tuple(self._value(d, index_of, positions[i]) for i, d in enumerate(self.values))
        steps = tuple(self._step(d, index_of, step_of) for d in self.steps)
        final = self._final_step(index_of, step_of)
        saved = sorted({index_of[r] for n in reference for r in self.roots.get(n, ()) if r in index_of})
        estimated = sorted({d.op.target for d in (*self.values, *self.steps) if d.op.estimated})
        chosen = tuple(i for i in saved if values[i].is_saveable)
        return Problem(values, (*steps, final), step_time_ns, chosen, tuple(estimated))

    # -- one node -----------------------------------------------------------------------------------------------------

    def _add(self, node: fx.Node, index: int) -> None:
        op = describe(node)
        pin, tag = self.pins.read(node, op)
        sources = tuple(dict.fromkeys(r for n in node.all_input_nodes for r in self.roots.get(n, ())))
        if op.kind is OpKind.SYMBOL:
            is_handed_over = node in self.handed_over or node in self.joint.info.tangents_closure
            # A size that nobody hands over is read off its tensor, which has to be computed for that.
            self.roots[node] = () if is_handed_over else tuple(r for r in sources if r in self.drafts)
            return
        if op.kind is OpKind.VIEW or (op.kind is OpKind.ITEM and self._is_alias_item(node)):
            self.roots[node] = sources
            if joint_graph.must_be_in_forward(node):  # `extract` hands it over, and with it the memory of its root
                for root in sources:
                    if root in self.drafts:
                        self.drafts[root].pin, self.drafts[root].tag = SAVE, Tag.NONE
            return
        in_backward = node in self.joint.info.tangents_closure
        draft = _Draft(
            op=op,
            kernel=KERNELS[op.kind],
            nbytes=0 if writes_into_input(node) else joint_graph.storage_nbytes(node.meta.get("val")),
            sources=tuple(self.drafts[r] for r in sources if r in self.drafts),
            input_reads=tuple(
                (r.name, joint_graph.storage_nbytes(r.meta.get("val"))) for r in sources if r not in self.drafts
            ),
            in_forward=self.joint.info.is_required_fw(node),
            in_backward=in_backward,
            mask_factor=self._mask_factor(node),
            node=node,
            joint_index=index,
            pin=pin,
            tag=tag,
        )
        draft.depth = max((s.depth + (s.kernel == EXTERN) for s in draft.sources), default=0)
        self._gather(draft)
        draft.is_channels_last = self._is_channels_last(draft)
        self.drafts[node] = draft
        self.roots[node] = (node,)
        if in_backward:
            self.steps.append(draft)
        else:
            draft.late_step = len(self.steps) if self.is_past_tangents and not draft.in_forward else -1
            self.values.append(draft)

    def _rules_of(self, node: fx.Node) -> InductorRules:
        """For the device that the node's value is on."""
        value = node.meta.get("val")
        return self.rules(value.device.type if isinstance(value, torch.Tensor) else "cpu")

    def _mask_factor(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        is_mask = isinstance(value, torch.Tensor) and value.dtype is torch.bool
        return self._rules_of(node).mask_traffic_factor if is_mask else 1

    def _is_alias_item(self, node: fx.Node) -> bool:
        source = node.all_input_nodes[0]
        return source not in self.drafts

    def _is_channels_last(self, draft: _Draft) -> bool:
        """The order that Inductor gives the node's buffer: a convolution's own, and what is computed from such elementwise.

        What is read in another shape as well is made in the order of its dimensions.
        """
        value = draft.node.meta.get("val")
        if draft.kernel == ITEM:
            return conv_layout.is_channels_last(value, self.rules) and any(
                s.op.kind is OpKind.CONV for s in draft.sources
            )
        if draft.op.kind is OpKind.CONV:
            return conv_layout.is_channels_last(value, self.rules)
        if draft.kernel != POINTWISE or not conv_layout.is_channels_last(value, self.rules) or is_reshaped(draft.node):
            return False
        like = [
            s
            for s in draft.sources
            if isinstance(s, _Draft) and (draft.concatenates or shape(s.node) == shape(draft.node))
        ]
        if draft.concatenates:  # `ConcatKernel.create` knows no order of what is not computed yet
            return any(
                (s.is_channels_last and s.kernel != POINTWISE) or (s.concatenates and s.is_channels_last) for s in like
            )
        return any(s.is_channels_last for s in like)

    def _gather(self, draft: _Draft) -> None:
        """Follow Inductor's count of the buffers that a fused expression reads (``GraphLowering.run_node``)."""
        if draft.kernel == CONSTANT:
            return  # an index or a fill is written into the expression: nothing is read
        if draft.kernel != POINTWISE:
            draft.gathered = frozenset({draft.node.name})
            return
        rules = self._rules_of(draft.node)
        reads = frozenset().union(*(s.gathered for s in draft.sources if isinstance(s, _Draft)))
        reads |= {name for name, _ in draft.input_reads}
        name = draft.op.target.split(".")[1] if "." in draft.op.target else draft.op.target
        draft.has_heavy = name in rules.heavy_ops or any(s.has_heavy for s in draft.sources if isinstance(s, _Draft))
        reused = most_users(draft.node) > 1
        if name in rules.drawn_ops:
            draft.gathered, draft.is_drawn = frozenset({draft.node.name}), True
            return
        if name == "cat" and (
            rules.always_concatenates or all(isinstance(s, _Draft) and s.kernel != POINTWISE for s in draft.sources)
        ):
            draft.gathered, draft.concatenates = frozenset({draft.node.name}), True
            return
        draft.realised = len(reads) > rules.max_reads or (
            reused and (len(reads) > rules.max_reads_if_reused or draft.has_heavy)
        )
        extern_reader = any(
            u in self.joint.info.tangents_closure and (_is_extern(u) or u in self.addmms) for u in draft.node.users
        )
        draft.realised |= draft.node in self.addmms or any(
            str(u.target) in rules.strided_readers for u in draft.node.users
        )
        if draft.realised or extern_reader:
            draft.gathered, draft.has_heavy = frozenset({draft.node.name}), False
        else:
            draft.gathered = reads

    # -- what only the whole graph tells ------------------------------------------------------------------------------

    def _mark_outputs(self) -> None:
        for node in (*self.joint.fwd_outputs, *self.joint.bwd_outputs):
            for root in self.roots.get(node, ()):
                draft = self.drafts.get(root)
                if draft is not None:
                    draft.is_output |= draft.in_backward or node in self.joint.fwd_outputs

    def _gradient_readers(self, step_of: dict[fx.Node, int]) -> dict[fx.Node, tuple[int, ...]]:
        """For roots of outputs, the steps that read the gradient that comes in: tangents have their outputs' order and sizes."""
        closure = self.joint.info.tangents_closure
        inputs = self.joint.module.graph.find_nodes(op="placeholder")  # in the order of the graph
        readers: dict[fx.Node, set[int]] = {n: set() for n in inputs if n in closure}
        for node, step in step_of.items():
            for root in {r for read in node.all_input_nodes for r in self.roots.get(read, ())} & readers.keys():
                readers[root].add(step)
        open_outputs = [node for node in self.joint.fwd_outputs if isinstance(node.meta.get("val"), torch.Tensor)]
        found: dict[fx.Node, tuple[int, ...]] = {}
        for tangent, steps in readers.items():
            output = next((n for n in open_outputs if _has_size_of(n, tangent)), None)
            if output is None:
                continue
            del open_outputs[: open_outputs.index(output) + 1]
            for root in self.roots.get(output, ()) if steps else ():
                found[root] = tuple(sorted(steps))
        return found

    def _mark_written_constants(self) -> None:
        """A constant that an unfused kernel reads is written to memory like any other value: saving it spares that."""
        for draft in (*self.values, *self.steps):
            if draft.kernel == EXTERN:
                for source in draft.sources:
                    if source.kernel == CONSTANT:
                        source.kernel = POINTWISE

    def _mark_realised(self) -> None:
        """A realised value whose readers all lie in its own fused kernel is never allocated."""
        places = self._places_of_readers()
        for draft in (*self.values, *self.steps):
            if draft.concatenates:
                draft.realised = True
            elif draft.realised:
                draft.realised = any(place != draft.depth for place in places[id(draft)])

    def _places_of_readers(self) -> dict[int, set[int]]:
        """Depths of the kernels that read each node, NEVER_FUSED for those that stay alone.

        A reader that stays in registers is part of its own readers' kernels, which may run much later: the state of a
        recurrent cell is read through two products by the next step's kernel.
        """
        drafts = sorted((*self.values, *self.steps), key=lambda d: d.joint_index)
        places: dict[int, set[int]] = {id(draft): set() for draft in drafts}
        for draft in reversed(drafts):
            found = places[id(draft)]
            if draft.kernel == EXTERN:
                here = {NEVER_FUSED}
            elif draft.kernel != POINTWISE or draft.realised or draft.is_output or not found or NEVER_FUSED in found:
                here = {draft.depth}
            else:
                here = found
            for source in draft.sources:
                if isinstance(source, _Draft):
                    places[id(source)] |= here
        return places

    def _mark_copied_inputs(self) -> None:
        """Inputs of convolutions that Inductor copies into its layout: the backward gets the copies."""
        last: dict[fx.Node, _Draft] = {}
        for draft in self.steps:
            if draft.op.kind is OpKind.CONV:
                last |= {n: draft for n in draft.node.all_input_nodes if n.op == "placeholder"}
        for draft in (*self.values, *self.steps):
            if draft.op.kind is OpKind.CONV:
                self._mark_copied_arguments(draft)
        for node, draft in last.items():
            is_tangent = node in self.joint.info.tangents_closure
            if not is_tangent and conv_layout.is_copied(node.meta.get("val"), self.rules):
                draft.held_bytes += joint_graph.storage_nbytes(node.meta["val"])

    def _mark_copied_arguments(self, convolution: _Draft) -> None:
        """What is made in another order than the convolution wants is copied, by a kernel that stands before it.

        Then the two lie side by side; when the convolution runs, its outputs lie in the place of one of them.
        """
        value = convolution.node.meta.get("val")
        outputs = value if isinstance(value, list | tuple) else (value,)
        output_bytes = sum(joint_graph.storage_nbytes(v) for v in outputs)
        for node in convolution.node.all_input_nodes:
            for root in self.roots.get(node, ()):
                draft = self.drafts.get(root)
                if draft is None or draft.kernel != POINTWISE or draft.is_channels_last:
                    continue
                if not conv_layout.is_channels_last(node.meta.get("val"), self.rules):
                    continue
                if draft.concatenates:
                    draft.copied_bytes = draft.nbytes
                    draft.ordered_by = [s.node for s in draft.sources if isinstance(s, _Draft) and s.is_channels_last]
                    convolution.copies.append(root)
                elif is_reshape(root, node):
                    convolution.copied_bytes = max(convolution.copied_bytes, draft.nbytes - output_bytes)

    def _mark_parts(self) -> None:
        """Inductor has what is concatenated written into its place, where it is a buffer of one concatenation (`ConcatKernel`)."""
        taken: set[fx.Node] = set()
        for draft in self.values:
            if draft.concatenates:
                for source in draft.node.all_input_nodes:
                    part = self.drafts.get(source)
                    if part is None or part.kernel != POINTWISE or source in taken:
                        continue
                    if not (part.concatenates or part.is_output or part.is_drawn):
                        taken.add(source)
                        draft.parts.append(source)

    # -- results ------------------------------------------------------------------------------------------------------

    def _value(self, draft: _Draft, index_of: dict[fx.Node, int], position: int) -> Value:
        return Value(
            name=draft.node.name,
            nbytes=draft.nbytes,
            kernel=draft.kernel,
            reads=_indices(draft, index_of),
            time_ns=draft.time_ns,
            save_time_ns=draft.save_time_ns,
            pin=draft.pin,
            tag=draft.tag,
            in_forward=draft.in_forward,
            is_output=draft.is_output,
            realised=draft.realised or draft.is_drawn,
            is_drawn=draft.is_drawn,
            may_differ=may_differ(draft.node, draft.op),
            position=position,
            late_step=draft.late_step,
            transient_bytes=_unread_bytes(draft.node) + draft.copied_bytes,
            is_channels_last=draft.is_channels_last,
            workspace_bytes=self.workspace(draft.node) if draft.kernel == EXTERN else 0,
            copies=tuple(sorted(index_of[n] for n in draft.copies)),
            parts=tuple(sorted(index_of[n] for n in draft.parts)),
            ordered_by=tuple(sorted({index_of[n] for n in draft.ordered_by if n in index_of})),
            gradient_readers=self.gradient_readers.get(draft.node, ()) if draft.is_output else (),
            origin=origin_of(draft.node, self.regions),
        )

    def _step(self, draft: _Draft, index_of: dict[fx.Node, int], step_of: dict[fx.Node, int]) -> Step:
        return Step(
            name=draft.node.name,
            nbytes=draft.nbytes,
            kernel=draft.kernel,
            reads=_indices(draft, index_of),
            gradients=_indices(draft, step_of),
            time_ns=draft.time_ns,
            is_output=draft.is_output,
            realised=draft.realised,
            transient_bytes=_unread_bytes(draft.node) + draft.copied_bytes,
            is_channels_last=draft.is_channels_last,
            workspace_bytes=self.workspace(draft.node) if draft.kernel == EXTERN else 0,
            held_bytes=draft.held_bytes,
            origin=origin_of(draft.node, self.regions),
        )

    def _final_step(self, index_of: dict[fx.Node, int], step_of: dict[fx.Node, int]) -> Step:
        roots = list(dict.fromkeys(r for n in self.joint.bwd_outputs for r in self.roots.get(n, ())))
        reads = tuple(sorted(index_of[r] for r in roots if r in index_of))
        gradients = tuple(sorted(step_of[r] for r in roots if r in step_of))
        return Step("output", 0, CONSTANT, reads, gradients)


# -- small questions --------------------------------------------------------------------------------------------------


def _indices(draft: _Draft, table: dict[fx.Node, int]) -> tuple[int, ...]:
    return tuple(sorted({table[s.node] for s in draft.sources if isinstance(s, _Draft) and s.node in table}))


def _has_size_of(node: fx.Node, other: fx.Node) -> bool:
    return str(node.meta["val"].shape) == str(other.meta["val"].shape)


def _positions(values: list[_Draft], index_of: dict[fx.Node, int]) -> list[int]:
    """Places in which every value that only the backward needs stands right behind what it reads."""
    keys: list[tuple[int, ...]] = []
    for i, draft in enumerate(values):
        if draft.in_forward:
            keys.append((i,))
        else:
            keys.append((*max((keys[j] for j in _indices(draft, index_of)), default=(-1,)), i))
    ranks = {key: rank for rank, key in enumerate(sorted(keys))}
    return [ranks[key] for key in keys]


def _is_extern(node: fx.Node) -> bool:
    return node.op == "call_function" and KERNELS.get(describe(node).kind) == EXTERN


def _unread_bytes(node: fx.Node) -> int:
    """Bytes of those outputs of a multi-output node that no getitem takes."""
    value = node.meta.get("val")
    if not isinstance(value, list | tuple):
        return 0
    read = {u.args[1] for u in node.users if describe(u).kind is OpKind.ITEM}
    return sum(joint_graph.storage_nbytes(v) for i, v in enumerate(value) if i not in read)


def origin_of(node: fx.Node, regions: Mapping[int | None, int] = NO_REGIONS) -> Origin:
    """Where a node comes from in the user's program; `regions` numbers the checkpointed ones."""
    value = node.meta.get("val")
    shape: tuple[int, ...] = ()
    dtype = ""
    if isinstance(value, torch.Tensor):
        shape, dtype = joint_graph.hint_shape(value), str(value.dtype).removeprefix("torch.")
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    lines = _SOURCE_LINE.findall(node.meta.get("stack_trace") or "")
    line = f"{lines[-1][0]}:{lines[-1][1]}" if lines else ""
    return Origin(shape, dtype, plain_path(path), line, regions.get(joint_graph.region_of(node), 0))


def plain_path(path: str) -> str:
    """``L['self']._modules['0'].attn._parameters['weight']`` as a user writes it: ``0.attn.weight``."""
    path = re.sub(r"^L\['(fn|self)'\]|^L__self__|^[LG](?=\[)", "", path)
    names = r"\._(?:modules|parameters|buffers)\['([^']*)'\]|\['([^']*)'\]"
    path = re.sub(names, lambda m: "." + (m.group(1) or m.group(2) or ""), path)
    return path.strip("._")
