"""Pins: nodes that every plan must save or must recompute.  The planner and its fallback both read them here."""

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
"""Namespaces of operators whose second run gives the same numbers; other operators are saved unless a tag says otherwise."""

EXTREMES = frozenset(getattr(torch.ops.aten, name).default for name in ("amax", "amin", "max", "min"))
"""Reductions whose gradient goes to the elements that equal the result."""


class Pins:
    """The pins of a joint graph's nodes, read in the graph's order.

    Correctness comes before tags.  Saved under any tag are operators that mutate an input, operators that read an input which the
    forward mutates, and random numbers that Inductor would draw differently in another kernel.  Random and custom operators are
    saved unless a tag asks to recompute them: torch replays the random state of tagged operators, and the user knows whether a
    custom operator may run twice.  Collectives are saved unless they are tagged MUST_RECOMPUTE.  All other nodes follow their tags.
    Outputs in `Joint.left_alone` are recomputed unless one of these rules pins them to be saved.
    The outputs of a multi-output node share its pin.  A view has no pin: the view stands for the tensor that it aliases.
    """

    def __init__(self, joint: joint_graph.Joint, rules: RulesOf = inductor_rules) -> None:
        self._joint, self._rules = joint, rules
        self._overwritten = joint_graph.mutated_inputs(joint)  # and nodes that share the memory of these inputs
        self._kernels: dict[fx.Node, tuple[Pin, Tag]] = {}
        self._compared = _pins_of_comparisons(joint)

    def read(self, node: fx.Node, op: Op) -> tuple[Pin, Tag]:
        """Returns FREE, SAVE or RECOMPUTE, and the user's tag that is the reason; all earlier nodes must have been read."""
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
            return SAVE, Tag.NONE  # a plan may ignore PREFER_RECOMPUTE on one rank and not on another
        if tag in (MUST_RECOMPUTE, PREFER_RECOMPUTE):
            return RECOMPUTE, tag
        if may_differ(node, op):
            return SAVE, Tag.NONE
        return (SAVE, tag) if tag else (FREE, Tag.NONE)

    def _is_drawn_by_kernel(self, node: fx.Node) -> bool:
        """Returns whether the kernels of the backward might draw other random numbers than the kernels of the forward drew."""
        value = node.meta.get("val")
        if node.target is not torch.ops.prims.inductor_random.default or not isinstance(value, torch.Tensor):
            return False
        return self._rules(value.device.type).draws_by_kernel


def _pins_of_comparisons(joint: joint_graph.Joint) -> dict[fx.Node, Pin]:
    """Pins of bfloat16 and float16 tensors that the backward compares with their own maximum, and of the resulting masks.

    A fused kernel computes bfloat16 in float32 and rounds when it stores a tensor.  Elements that a kernel recomputes are not
    rounded and equal no stored maximum: the gradient would be zero, or NaN where it is divided by the number of equal elements.
    So the compared tensor is saved.  The comparison and the nodes computed from the mask are recomputed in the backward.
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
    """Returns whether a second run may give other numbers or have side effects: a random operator, or one of unknown purity."""
    return op.is_random or _is_impure(node)


def must_be_saved(joint: joint_graph.Joint) -> list[fx.Node]:
    """The nodes that every plan must save if the backward needs their values."""
    pins, found = Pins(joint), list[fx.Node]()
    for node in joint.module.graph.nodes:
        if node.op != "call_function":
            continue
        op = describe(node)
        if pins.read(node, op)[0] == SAVE and node not in joint.info.tangents_closure and _can_be_saved(node, op):
            found.append(node)
    return found


def writes_into_input(node: fx.Node) -> bool:
    """Returns whether the node returns an argument that it has overwritten, by the operator's schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)


def _can_be_saved(node: fx.Node, op: Op) -> bool:
    has_bytes = sizes.storage_nbytes(node.meta.get("val")) > 0
    return has_bytes and op.kind is not OpKind.CONSTANT and not writes_into_input(node)


def _is_impure(node: fx.Node) -> bool:
    if is_sliced(node):  # slices contain no random operators
        return False
    namespace = namespace_of(node)
    return not _is_python_builtin(node.target) if namespace is None else namespace not in PURE_NAMESPACES


def _is_python_builtin(target: object) -> bool:
    return getattr(target, "__module__", "") in ("_operator", "builtins", "math")
