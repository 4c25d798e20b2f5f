"""Early gradients: gradients that leave the backward as soon as they are computed (`gradients="early"`).

`mark_gradients` rewrites a joint graph before it is planned: a `GRADIENT_READY` after the last contribution to a gradient and the
last step that reads its parameter takes the gradient's place among the outputs.  So the planner sees the gradient die there.
`deliver_marked` rewrites the backward of a plan: it replaces each mark by a `DELIVER`, further down if the backward recomputes a
reader of the parameter later, and the backward returns None for the gradient.

A step that Inductor computes in the kernel of its reader reads the parameter in that kernel.  A delivery before that kernel would
force the step to memory, because the operator may change the parameter.

An argument that the forward returns, itself or as a view, keeps its gradient to the end: autograd passes such an output around the
graph, and code outside of the graph contributes to the gradient later.

The other parts: `compilation.early_gradients` decides if a graph's gradients may leave early, `_torch.delivery` has the operators,
`inductor.early_backward` the early compilation of a backward, and `runtime.early_gradients` hands each gradient to its parameter.

A gradient is copied when it leaves if it does not own its memory: two parameters share it, it is a part of a larger tensor, or it
is an input of the graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from compile_remat._torch import joint_graph, sizes
from compile_remat._torch.delivery.delivery_ops import DELIVER, GRADIENT_READY, forget_mutation_regions
from compile_remat.passes.graph.reading_kernels import inlined_nodes, kernels_of, readers_of_memory
from compile_remat.passes.graph.rewrites.contract import Rewritten, RewrittenJoint
from compile_remat.passes.graph.views import is_part, memory_of, owner_of

INDEX = "compile_remat_gradient"
"""Key of a mark's ``meta`` that holds the position of its gradient among the outputs of the backward."""


NO_LEAF = "no argument that is a leaf and no output gets a gradient"
"""Reason that `mark_gradients` returns if no gradient can leave early."""


def mark_gradients(joint: joint_graph.Joint, arguments: Collection[int]) -> RewrittenJoint:
    """Mark the gradients of some arguments, in place; returns the number of marks, and the reason if there are none.

    Args:
        arguments: Positions of the arguments that are leaves of autograd.
    """
    module = joint.module
    output = module.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    gradients = outputs[joint.num_fwd_outputs :]
    primals = _primals(joint)
    if len(primals) != len(gradients) or any(_is_part_of_subclass(p) for p in primals):
        return RewrittenJoint(
            0, joint, "its arguments are tensor subclasses, or it has tokens of effects or states of generators"
        )
    owners = Counter(owner_of(n) for n in outputs if isinstance(n, fx.Node))
    returned_past = {memory_of(n) for n in joint.fwd_outputs}
    marks: dict[int, fx.Node] = {}
    inlined = inlined_nodes(module.graph)
    for index, (primal, gradient) in enumerate(zip(primals, gradients, strict=True)):
        is_leaf = getattr(primal.meta.get("desc"), "idx", None) in arguments
        is_leaf = is_leaf and primal not in returned_past
        if is_leaf and isinstance(gradient, fx.Node) and gradient in joint.info.tangents_closure:
            marks[index] = mark = _mark(joint, primal, gradient, inlined, is_copied=owners[owner_of(gradient)] > 1)
            mark.meta[INDEX] = index
    if not marks:
        return RewrittenJoint(0, joint, NO_LEAF)
    for index, mark in marks.items():
        outputs[joint.num_fwd_outputs + index] = mark
    output.args = (outputs, *output.args[1:])
    module.recompile()
    returned = outputs[joint.num_fwd_outputs :]
    joint = replace(joint, bwd_outputs=tuple(n for n in returned if isinstance(n, fx.Node)))
    return RewrittenJoint(len(marks), joint)


def deliver_marked(backward: fx.GraphModule, joint: joint_graph.Joint) -> Rewritten:
    """Replace the marks by deliveries in a backward that was extracted from `joint`; returns the number of deliveries."""
    graph = backward.graph
    marks = graph.find_nodes(op="call_function", target=GRADIENT_READY)
    if not marks:
        return Rewritten(0)
    primals = _primals(joint)
    tensors = [k for k, p in enumerate(primals) if isinstance(p.meta.get("val"), torch.Tensor)]
    edges = {k: edge for edge, k in enumerate(tensors)}
    aliases, inlined = _aliases(graph, joint), inlined_nodes(graph)
    output = graph.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for mark in reversed(marks):  # reversed: deliveries at one place keep the order of their marks
        gradient, copied = mark.args
        assert isinstance(gradient, fx.Node)
        index = int(mark.meta[INDEX])
        parameter = aliases.get(primals[index].name, [])
        readers = [*readers_of_memory(owner_of(gradient)), *readers_of_memory(*parameter)]
        with graph.inserting_after(_last([mark, *kernels_of(readers, inlined)])):
            place = (index, edges[index], len(tensors), bool(copied))
            delivery = graph.call_function(DELIVER, (gradient, parameter, *place))
        delivery.meta = {**mark.meta, "val": None}
    delivered = set(marks)
    output.args = (tuple(None if node in delivered else node for node in returned), *output.args[1:])
    for mark in marks:
        graph.erase_node(mark)
    forget_mutation_regions(graph)
    backward.recompile()
    return Rewritten(len(marks))


def marked_bytes(joint: joint_graph.Joint) -> tuple[int, ...]:
    """Bytes of each marked gradient, in the graph's order."""
    marks = joint.module.graph.find_nodes(op="call_function", target=GRADIENT_READY)
    return tuple(sizes.storage_nbytes(mark.all_input_nodes[0].meta["val"]) for mark in marks)


def copied_bytes(node: fx.Node) -> int:
    """Bytes of the copy that a mark makes of its gradient when it leaves; 0 if there is no copy, and for other nodes."""
    if node.target is not GRADIENT_READY or not node.args[1]:
        return 0
    value: torch.Tensor = node.all_input_nodes[0].meta["val"]
    return math.prod(sizes.hint_shape(value)) * value.dtype.itemsize


def _mark(
    joint: joint_graph.Joint, primal: fx.Node, gradient: fx.Node, inlined: Collection[fx.Node], *, is_copied: bool
) -> fx.Node:
    owner, closure = owner_of(gradient), joint.info.tangents_closure
    readers = kernels_of([n for n in (*readers_of_memory(primal), *readers_of_memory(owner)) if n in closure], inlined)
    is_copied = is_copied or owner.op != "call_function" or is_part(owner)
    with joint.module.graph.inserting_after(_last([gradient, *readers])):
        mark = joint.module.graph.call_function(GRADIENT_READY, (gradient, is_copied))
    mark.meta = {**gradient.meta, "val": gradient.meta["val"].new_empty(0)}
    closure.add(mark)
    joint.info.required_bw_nodes.add(mark)
    return mark


def _primals(joint: joint_graph.Joint) -> list[fx.Node]:
    """The inputs of a joint graph, tangents excluded."""
    inputs = joint.module.graph.find_nodes(op="placeholder")
    return [node for node in inputs if node not in joint.info.tangents_closure]


def _is_part_of_subclass(primal: fx.Node) -> bool:
    return type(primal.meta.get("desc")).__name__.startswith("Subclass")


def _aliases(backward: fx.Graph, joint: joint_graph.Joint) -> dict[str, list[fx.Node]]:
    """For each argument of the forward, by name, the inputs of the backward that may share its memory."""
    nodes = {n.name: n for n in joint.module.graph.nodes}
    found: dict[str, list[fx.Node]] = {}
    for given in backward.find_nodes(op="placeholder"):
        node = nodes.get(given.name)
        if node is not None and isinstance(given.meta.get("val"), torch.Tensor):
            found.setdefault(owner_of(node).name, []).append(given)
    return found


def _last(nodes: Iterable[fx.Node]) -> fx.Node:
    """The last of some nodes in the graph's order."""
    return max(nodes)
