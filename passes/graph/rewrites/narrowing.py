"""Values that may be saved in fewer bits than they have, without loss: bools as bits, indices in the smallest type for their range.

`narrow_values` gives each such value of a joint graph a narrow form, and has all that read the value read what is made of the form:

    gt = gt(rand, 0.1)                 gt = gt(rand, 0.1)
    y = mul(gt, x)              ->     gt_narrow = pack_bits(gt)
                                       gt_wide = unpack_bits(gt_narrow)
                                       y = mul(gt_wide, x)

So a value has three states, and the planner needs to know of none: it saves the value (or the wide form, which is the same), it
saves the narrow form, or it computes the value again.  The form's kernel is priced as what saving it costs, the way back as a
pointwise value, which Inductor computes in the kernels of the readers.  `keep_narrow` takes the forms back that a plan does not
save: what is left is the graph that was there before.  Where a form stays, the forward reads the value back as well: the value
itself dies where the form is made.

Random numbers are values like others: a mask of dropout is computed from a seed, and has a narrow form.  Constants, outputs, values
of dynamic sizes, and values that a user's tag speaks of have none, nor has what is computed of less than the form would hold: the
comparison of a loss's targets with all words of the vocabulary reads one number for each row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from compile_remat._torch import joint_graph, sizes
from compile_remat._torch.codegen_rules import RulesOf, inductor_rules
from compile_remat._torch.narrowing.bit_ops import PACK_BITS, UNPACK_BITS, num_bytes
from compile_remat._torch.operators import is_mutable
from compile_remat.cost_models import OpKind, op_kind
from compile_remat.passes.graph.reading_kernels import bytes_of_sources
from compile_remat.passes.graph.rewrites.static_ranges import narrow_type, num_indices
from compile_remat.passes.graph.views import fake_mode_of, root_of

LEAST_BYTES = 4096
"""Smaller values are left alone: a kernel for a page of memory is not worth it."""

NARROW, WIDE = "_narrow", "_wide"
"""What the names of a narrow form, and of what is made of it, end in behind the value's."""

CAST: Any = torch.ops.prims.convert_element_type.default
CONVOLUTION = torch.ops.aten.convolution.default
CHANNELS_LAST = (0, 2, 3, 1)


@dataclass(frozen=True)
class NarrowForm:
    """A value of a joint graph with its narrow form, and the value as it is made of that.

    Attributes:
        nbytes: Of the value.
        narrow_bytes: Of the form.
    """

    value: fx.Node
    narrow: fx.Node
    wide: fx.Node
    nbytes: int
    narrow_bytes: int


def narrow_values(
    joint: joint_graph.Joint, rules: RulesOf = inductor_rules, *, are_wanted: bool = True
) -> tuple[joint_graph.Joint, tuple[NarrowForm, ...]]:
    """Give every value a narrow form that can have one, in place; returns the graph as it is classified now, and the forms.

    Args:
        are_wanted: Else there are none.
    """
    forms = [_narrowed(joint, node, dtype, rules) for node, dtype in _narrowable(joint)] if are_wanted else []
    if not forms:
        return joint, ()
    joint.module.recompile()
    return joint_graph.classified_again(joint), tuple(forms)


def keep_narrow(
    joint: joint_graph.Joint, forms: Iterable[NarrowForm], saved: Collection[str]
) -> tuple[joint_graph.Joint, tuple[NarrowForm, ...], dict[str, str]]:
    """Take the forms back that are not among the saved values, in place.

    Returns:
        The graph as it is classified now, the forms that stay, and for every name that is gone the name of the value.
    """
    kept: list[NarrowForm] = []
    dropped: dict[str, str] = {}
    for form in forms:
        if form.narrow.name in saved:
            kept.append(form)
            continue
        dropped |= {form.narrow.name: form.value.name, form.wide.name: form.value.name}
        form.wide.replace_all_uses_with(form.value)
        joint.module.graph.erase_node(form.wide)
        joint.module.graph.erase_node(form.narrow)
    joint.module.recompile()
    return joint_graph.classified_again(joint), tuple(kept), dropped


def may_narrow(module: fx.GraphModule) -> bool:
    """Whether a graph, as torch gave it, has a tensor that could have a narrow form."""
    return any(node.op == "call_function" and _narrow_dtype(node) is not None for node in module.graph.nodes)


def narrowable_bytes(joint: joint_graph.Joint) -> int:
    """Bytes that all narrow forms of a joint graph together would spare."""
    return sum(_nbytes(node) - _narrow_bytes(node, dtype) for node, dtype in _narrowable(joint))


def _narrowable(joint: joint_graph.Joint) -> list[tuple[fx.Node, torch.dtype]]:
    """Values with a narrow form, and its type: uint8 stands for bits where the value is a bool."""
    read_in_backward, outputs = _read_in_backward(joint), {root_of(node) for node in joint.fwd_outputs}
    candidates = read_in_backward & _computed_from_inputs(joint)
    found: list[tuple[fx.Node, torch.dtype]] = []
    for node in joint.module.graph.nodes:
        if node in candidates and node not in outputs and _may_be_replaced(joint, node):
            dtype = _narrow_dtype(node)
            if dtype is None:
                continue
            nbytes = bytes_of_sources(node)
            if nbytes is None or nbytes >= _narrow_bytes(node, dtype):
                found.append((node, dtype))
    return found


def _read_in_backward(joint: joint_graph.Joint) -> set[fx.Node]:
    """Values that the backward reads, or may compute something of that it reads."""
    found, closure = set[fx.Node](), joint.info.tangents_closure
    for node in reversed(joint.module.graph.nodes):
        if node in found or node in closure:
            found.update(n for n in node.all_input_nodes if n not in closure)
    return found


def _computed_from_inputs(joint: joint_graph.Joint) -> set[fx.Node]:
    """What is computed from inputs of the graph or from random seeds, and not from constants alone, which cost nothing."""
    found = set[fx.Node]()
    for node in joint.module.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes) or (
            not node.all_input_nodes and op_kind(node) != OpKind.CONSTANT
        ):
            found.add(node)
    return found


def _may_be_replaced(joint: joint_graph.Joint, node: fx.Node) -> bool:
    if node.op != "call_function" or node.meta.get("recompute") is not None or joint_graph.must_be_in_forward(node):
        return False
    return op_kind(node) not in (OpKind.VIEW, OpKind.CONSTANT, OpKind.SYMBOL) and not is_mutable(node.target)


def _narrow_dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.bool, torch.int64):
        return None
    if value.layout is not torch.strided or not all(isinstance(s, int) for s in (*value.shape, *value.stride())):
        return None
    nbytes = sizes.storage_nbytes(value)
    if nbytes < LEAST_BYTES or nbytes != value.numel() * value.dtype.itemsize:
        return None
    if value.dtype is torch.bool:
        return torch.uint8
    count = num_indices(node)
    return None if count is None else narrow_type(count)


def _narrowed(joint: joint_graph.Joint, node: fx.Node, dtype: torch.dtype, rules: RulesOf) -> NarrowForm:
    graph, value = joint.module.graph, node.meta["val"]
    order = _memory_order(graph, value, rules)
    with graph.inserting_after(node):
        if value.dtype is torch.bool:
            narrow = graph.create_node("call_function", PACK_BITS, (node, order), {}, node.name + NARROW)
        else:
            narrow = graph.create_node("call_function", CAST, (node, dtype), {}, node.name + NARROW)
    with graph.inserting_after(narrow):
        if value.dtype is torch.bool:
            wide = graph.create_node(
                "call_function", UNPACK_BITS, (narrow, list(value.shape), order), {}, node.name + WIDE
            )
        else:
            wide = graph.create_node("call_function", CAST, (narrow, torch.int64), {}, node.name + WIDE)
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not narrow)
    for made in (narrow, wide):
        given, target = [a.meta["val"] if isinstance(a, fx.Node) else a for a in made.args], cast("Any", made.target)
        with fake_mode_of(value):
            made.meta = {**node.meta, "val": target(*given)}
    return NarrowForm(node, narrow, wide, _nbytes(node), _narrow_bytes(node, dtype))


def _memory_order(graph: fx.Graph, value: torch.Tensor, rules: RulesOf) -> list[int]:
    """The dimensions of a value, the outermost in memory first.  Any order is right; this one goes over contiguous elements."""
    has_convolutions = bool(graph.find_nodes(op="call_function", target=CONVOLUTION))
    if value.dim() == 4 and has_convolutions and rules(value.device.type).has_channels_last:
        return list(CHANNELS_LAST)
    strides = value.stride()
    return sorted(range(value.dim()), key=lambda d: (-strides[d], d))


def _nbytes(node: fx.Node) -> int:
    return sizes.storage_nbytes(node.meta["val"])


def _narrow_bytes(node: fx.Node, dtype: torch.dtype) -> int:
    value = node.meta["val"]
    return num_bytes(value.numel()) if value.dtype is torch.bool else value.numel() * dtype.itemsize
