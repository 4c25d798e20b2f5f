"""Which nodes must be saved and which must be recomputed, whatever the plan; the planner and its fallback both ask here."""

from __future__ import annotations

import torch
from torch import fx

from compile_remat._torch import joint_graph, sizes
from compile_remat._torch.codegen_rules import RulesOf, inductor_rules
from compile_remat._torch.operators import is_mutable, namespace_of, waits_for_others
from compile_remat.cost_models import Op, OpKind, describe
from compile_remat.passes.graph.slices.calls import is_sliced
from compile_remat.passes.graph.views import root_of
from compile_remat.passes.problem.problem import FREE, MUST_RECOMPUTE, PREFER_RECOMPUTE, RECOMPUTE, SAVE, Pin, Tag

PURE_NAMESPACES = frozenset({"aten", "prims", "prim", "inductor_prims", "quantized_decomposed"})
"""Operators whose second run gives the same numbers; others are saved unless the user's tag says otherwise."""

EXTREMES = frozenset(getattr(torch.ops.aten, name).default for name in ("amax", "amin", "max", "min"))
"""Reductions whose gradient goes to the elements that equal the result."""


class Pins:
    """The pins of a joint graph's nodes, read in the graph's order.

    What the truth demands comes before any tag: an operator that reads an input which the forward overwrites, or writes into
    one, is saved, and so are numbers that Inductor would draw otherwise in another kernel.  A random or custom operator is saved
    too, unless it is tagged to be recomputed: torch replays the random state of tagged ones, and of a custom one the user knows
    more than we do.  A collective is saved unless a tag says that it must be recomputed.  The rest is as its tag says, but for
    outputs that are left alone: never saved unless one of these demands it.
    Parts of a node with several outputs share its pin.  A view has none: it stands for what it aliases.
    """

    def __init__(self, joint: joint_graph.Joint, rules: RulesOf = inductor_rules) -> None:
        self._joint, self._rules = joint, rules
        self._overwritten = joint_graph.mutated_inputs(joint)  # and what shares their memory
        self._kernels: dict[fx.Node, tuple[Pin, Tag]] = {}
        self._compared = _pins_of_comparisons(joint)

    def read(self, node: fx.Node, op: Op) -> tuple[Pin, Tag]:
        """FREE, SAVE or RECOMPUTE, and the user's tag behind it; all nodes before this one have been read."""
        if op.kind is OpKind.SYMBOL:
            return FREE, Tag.NONE
        reads_overwritten = not self._overwritten.isdisjoint(node.all_input_nodes)
        if op.kind is OpKind.VIEW or (op.kind is OpKind.ITEM and node.all_input_nodes[0] not in self._kernels):
            if reads_overwritten:
                self._overwritten.add(node)
            return FREE, Tag.NONE
        pin = self._of_kernel(node, op, reads_overwritten)
        if node in self._joint.left_alone and pin[0] is not SAVE:
            pin = RECOMPUTE, Tag.NONE
        self._kernels[node] = pin
        if reads_overwritten and (op.kind is OpKind.ITEM or joint_graph.may_take_over(node, self._overwritten)):
            self._overwritten.add(node)
        return pin

    def _of_kernel(self, node: fx.Node, op: Op, reads_overwritten: bool) -> tuple[Pin, Tag]:
        if joint_graph.must_save(self._joint, node) or is_mutable(node.target) or reads_overwritten:
            return SAVE, Tag.NONE
        if self._is_drawn_by_kernel(node):
            return SAVE, Tag.NONE
        if node in self._compared:
            return self._compared[node], Tag.NONE
        parent = self._kernels[node.all_input_nodes[0]] if op.kind is OpKind.ITEM else None
        tag = Tag(self._joint.user_tags.get(node, ""))
        if parent is not None and (not tag or parent == (SAVE, Tag.NONE)):
            return parent
        if tag is not MUST_RECOMPUTE and waits_for_others(node.target):
            return SAVE, Tag.NONE  # `checkpoint` may be set aside: on one rank, and not on another
        if tag in (MUST_RECOMPUTE, PREFER_RECOMPUTE):
            return RECOMPUTE, tag
        if may_differ(node, op):
            return SAVE, Tag.NONE
        return (SAVE, tag) if tag else (FREE, Tag.NONE)

    def _is_drawn_by_kernel(self, node: fx.Node) -> bool:
        """Whether the backward's kernels might draw other numbers than the forward's did."""
        value = node.meta.get("val")
        if node.target is not torch.ops.prims.inductor_random.default or not isinstance(value, torch.Tensor):
            return False
        return self._rules(value.device.type).draws_by_kernel


def _pins_of_comparisons(joint: joint_graph.Joint) -> dict[fx.Node, Pin]:
    """Pins where the backward asks which elements equal their own maximum, in a type that memory rounds to and kernels do not.

    A fused kernel computes bfloat16 in float32 and rounds what it stores.  Elements that it computes again are not rounded and
    equal no maximum that was: the gradient would be zero, or NaN where it is divided by their number.  So the elements are saved,
    and what is computed of the comparison alone is computed in the backward, from memory.
    """
    found: dict[fx.Node, Pin] = {}
    for node in joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.eq.Tensor):
        operands = [root_of(x) for x in node.args if isinstance(x, fx.Node)]
        extremes = [x for x in operands if x.target in EXTREMES and root_of(x.all_input_nodes[0]) in operands]
        if not extremes or joint.info.is_required_fw(node):
            continue
        compared = root_of(extremes[0].all_input_nodes[0])
        if compared.op != "call_function" or compared.meta["val"].dtype not in (torch.bfloat16, torch.float16):
            continue
        found[compared] = SAVE
        pending = [node]
        while pending:
            mask = pending.pop()
            if mask not in found and mask not in joint.info.tangents_closure:
                found[mask] = RECOMPUTE
                pending += [user for user in mask.users if user.op == "call_function"]
    return found


def may_differ(node: fx.Node, op: Op) -> bool:
    """Whether a second run may give other numbers, or do something besides: a random operator, or one that we know nothing of."""
    return op.is_random or _is_impure(node)


def must_be_saved(joint: joint_graph.Joint) -> list[fx.Node]:
    """The nodes whose values any saved set must hold where the backward needs them."""
    pins, found = Pins(joint), list[fx.Node]()
    for node in joint.module.graph.nodes:
        if node.op != "call_function":
            continue
        op = describe(node)
        if pins.read(node, op)[0] == SAVE and node not in joint.info.tangents_closure and _can_be_saved(node, op):
            found.append(node)
    return found


def writes_into_input(node: fx.Node) -> bool:
    """Whether what the node returns is an argument that it has overwritten."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)


def _can_be_saved(node: fx.Node, op: Op) -> bool:
    has_bytes = sizes.storage_nbytes(node.meta.get("val")) > 0
    return has_bytes and op.kind is not OpKind.CONSTANT and not writes_into_input(node)


def _is_impure(node: fx.Node) -> bool:
    if is_sliced(node):  # nothing random is ever inside of a slice
        return False
    namespace = namespace_of(node)
    return not _is_python_builtin(node.target) if namespace is None else namespace not in PURE_NAMESPACES


def _is_python_builtin(target: object) -> bool:
    return getattr(target, "__module__", "") in ("_operator", "builtins", "math")
