"""Passes of the user on the joint graph (`joint_passes`), and the checks that each has to pass.

They run after the rewrites of kernels and of their order, and before the rewrites that describe how gradients leave and inputs are
read: a pass sees plain operators.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat._torch.fake import UNKNOWN, fake_result
from compile_remat._torch.input_mutation import writes_in_place
from compile_remat._torch.operators import tree_leaves
from compile_remat._torch.sizes import hint_shape, hint_strides
from compile_remat._util.user_pass import UserPass
from compile_remat.errors import PassError
from compile_remat.passes.graph.outputs import changeable_outputs, owners_of_outputs
from compile_remat.passes.graph.rewrites.contract import RewrittenJoint

LOG = logging.getLogger("compile_remat")


def run_user_passes(joint: joint_graph.Joint, passes: Iterable[UserPass]) -> RewrittenJoint:
    """Run passes in their order, in place; returns how many of them changed the graph, and its new classification.

    Raises:
        PassError: A pass failed, left a graph that is not well-formed, or changed an input or the kind of an output.
    """
    changed = 0
    for each in passes:
        before = _Nodes.of(joint.module.graph)
        joint = _after(each, joint)
        num_changed = before.num_changed(joint.module.graph)
        changed += num_changed > 0
        LOG.info("joint_passes: pass %s changed %d nodes", each.name, num_changed)
    return RewrittenJoint(changed, joint)


class _Nodes(dict[fx.Node, tuple[object, ...]]):
    """A note of the nodes of a graph at one time: target, arguments and fake value of each."""

    @staticmethod
    def of(graph: fx.Graph) -> _Nodes:
        """Returns the nodes as they are now."""
        return _Nodes({node: _Nodes._of(node) for node in graph.nodes})

    @staticmethod
    def _of(node: fx.Node) -> tuple[object, ...]:
        return node.target, node.args, node.kwargs, id(node.meta.get("val"))

    def changed(self, graph: fx.Graph) -> list[fx.Node]:
        """Returns the nodes that are new, or are not what they were."""
        return [node for node in graph.nodes if self.get(node) != _Nodes._of(node)]

    def num_changed(self, graph: fx.Graph) -> int:
        """Returns how many nodes are new, are not what they were, or are gone."""
        return len(self.changed(graph)) + len(self.keys() - set(graph.nodes))


def _after(given: UserPass, joint: joint_graph.Joint) -> joint_graph.Joint:
    """Returns the joint graph after one pass."""
    module = joint.module
    nodes, before = _Nodes.of(module.graph), _signature(module.graph)
    by_plain = changeable_outputs(joint) - joint.left_alone  # plain torch.compile saves these, too
    are_by_plain = [owner in by_plain for owner in owners_of_outputs(joint)]
    try:
        given.run(module.graph)
        module.graph.lint()
    except Exception as error:
        raise PassError(given.name, f"failed: {type(error).__name__}: {error}") from error
    if problem := _refused(module, nodes) or _changed(before, _signature(module.graph)):
        raise PassError(given.name, problem)
    joint = joint_graph.reclassified(joint, nodes)
    if joint.readable is None:  # the graph has its backward inside: no code of others runs between the two
        return joint
    kept = {owner for owner, is_kept in zip(owners_of_outputs(joint), are_by_plain, strict=True) if is_kept}
    return replace(joint, left_alone=changeable_outputs(joint) - kept)


def _changed(before: dict[str, str], after: dict[str, str]) -> str:
    """Returns the first difference of two calling conventions in words; empty if there is none."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, "nothing"), after.get(name, "nothing")
        if old != new:
            return f"changed {name} from {old} to {new}"
    return ""


def _refused(module: fx.GraphModule, before: _Nodes) -> str:
    """Returns the first problem of a node that is new or changed, in words; empty if there is none."""
    changed = [node for node in before.changed(module.graph) if node.op == "call_function"]
    written = writes_in_place(module)
    for node in changed:
        has = "added" if node not in before else "changed"
        if "val" not in node.meta:
            return f'gave its node {node.name} no meta["val"], from which the planner reads sizes'
        if node in written:
            return f"{has} {node.name}, which writes in place: an operator that is recomputed would read other values"
    readers = dict.fromkeys(reader for node in changed for reader in node.users if reader.op == "call_function")
    for node in {**dict.fromkeys(changed), **readers}:
        if problem := _untrue(node, with_strides=node not in before):
            return problem
    return ""


def _untrue(node: fx.Node, *, with_strides: bool) -> str:
    """Returns how the node's ``meta["val"]`` differs from what its operator gives, in words; empty if it does not.

    Args:
        with_strides: False for a node of torch's: its passes keep sizes true, and strides not always.
    """
    try:
        given = fake_result(node)
    except Exception as error:
        return f"left the node {node.name}, whose operator refuses its arguments: {type(error).__name__}: {error}"
    if given is UNKNOWN:
        return ""
    for has_strides in (False, True) if with_strides else (False,):
        told, found = _tensors(node.meta["val"], has_strides), _tensors(given, has_strides)
        if told != found:
            return f'left the node {node.name} with a meta["val"] of {told}, and {node.target} gives {found}'
    return ""


def _tensors(value: object, with_strides: bool) -> str:
    """Returns the dtype, the sizes and, if asked, the strides of each tensor of a result; the stride of one row is 0."""
    return ", ".join(_tensor(each, with_strides) for each in tree_leaves(value) if isinstance(each, torch.Tensor))


def _tensor(value: torch.Tensor, with_strides: bool) -> str:
    shape = hint_shape(value)
    text = f"{str(value.dtype).removeprefix('torch.')}{list(shape)}"
    if not with_strides or value.layout is not torch.strided or 0 in shape:
        return text
    strides = [stride if size > 1 else 0 for size, stride in zip(shape, hint_strides(value), strict=True)]
    return f"{text} with strides {strides}"


def _signature(graph: fx.Graph) -> dict[str, str]:
    """Returns the calling convention of a graph: a description of each input and output, by a name that messages print."""
    inputs = {f"input {k}": str(node.target) for k, node in enumerate(graph.find_nodes(op="placeholder"))}
    returned = graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    return inputs | {f"output {k}": _kind(node) for k, node in enumerate(returned)}


def _kind(returned: object) -> str:
    """Returns shape, dtype and device of an output as text: comparing symbolic sizes could add a guard."""
    value = returned.meta.get("val") if isinstance(returned, fx.Node) else returned
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}] on {value.device}"
    return str(value)
