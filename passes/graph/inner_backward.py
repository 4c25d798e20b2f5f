"""Inner backwards: graphs that hold a backward beside their forward, from a traced ``torch.autograd.grad`` or ``torch.func.grad``.

AOTAutograd hands such a graph to the inference compiler and calls no partitioner.  `as_joint` turns the graph into a joint graph:
nodes before the first gradient are the forward, all other nodes the backward.
``source_fn_stack`` names the call of Dynamo's graph that a node comes from; same in torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat._torch.input_mutation import writes_in_place

GRADIENT_CALLS = (torch.autograd.grad, torch.autograd.backward)
FUNCTORCH_CALL = "_autograd_grad"
"""Name of the function that Dynamo writes into a graph for ``torch.func.grad`` and similar transforms."""


@dataclass(frozen=True)
class InnerBackward:
    """A graph with an inner backward, whose nodes up to the end of that backward are a joint graph.

    Attributes:
        original: The whole graph; it is not changed.
        rest: Nodes of `original` after the joint graph.
        module: The joint graph: inputs are named primals, and the backward's nodes are tagged ``must_be_in_backward``.
        kept: Nodes of `original` that `rest` reads, in the order in which the joint graph returns them.
        num_fwd_outputs: Number of nodes in `kept` that belong to the forward.
    """

    original: fx.GraphModule
    rest: tuple[fx.Node, ...]
    module: fx.GraphModule
    kept: tuple[fx.Node, ...]
    num_fwd_outputs: int


def backward_calls(module: fx.GraphModule) -> list[str]:
    """Names of the gradient calls in Dynamo's graph from which nodes of `module` come, in the order of these nodes."""
    return list(dict.fromkeys(name for node in module.graph.nodes if (name := _gradient_call(node))))


def as_joint(module: fx.GraphModule, call: str | None) -> InnerBackward | None:
    """The graph up to the end of the backward that a call stands for; None if the graph writes in place or has a random checkpoint.

    Nodes after the last backward may belong to it, so for the last backward the joint graph extends to the output, or to the first
    ``copy_`` into an input.

    Args:
        call: Name of a gradient call (`backward_calls`); None takes all backwards as one, from the first gradient on.
    """
    if writes_in_place(module) or joint_graph.has_random_checkpoint(module):
        return None
    nodes = list(module.graph.nodes)
    own = [k for k, node in enumerate(nodes) if (found := _gradient_call(node)) and call in (None, found)]
    is_last = call in (None, backward_calls(module)[-1])
    writes = (k for k, n in enumerate(nodes) if n.op == "output" or n.target is torch.ops.aten.copy_.default)
    stop = next(writes) if is_last else own[-1] + 1
    graph, env, backward = fx.Graph(), dict[fx.Node, fx.Node](), set[fx.Node]()
    for k, node in enumerate(nodes[:stop]):
        if node.op == "placeholder":
            env[node] = graph.placeholder(f"primals_{k + 1}")
            env[node].meta = dict(node.meta)
            continue
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta.pop("partitioner_tag", None)
        if k >= own[0] and node.op == "call_function":
            backward.add(node)
            env[node].meta["partitioner_tag"] = "must_be_in_backward"
    rest = dict.fromkeys(nodes[stop:])
    read = [n for n in nodes[:stop] if n.op != "placeholder" and not rest.keys().isdisjoint(n.users)]
    kept = sorted(read, key=backward.__contains__)
    graph.output(tuple(env[node] for node in kept))
    num_fwd_outputs = sum(node not in backward for node in kept)
    return InnerBackward(module, tuple(rest), fx.GraphModule(module, graph), tuple(kept), num_fwd_outputs)


@contextmanager
def without_common_subexpressions(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the graph after CSE; inside the context `joint_graph.prepare` runs no CSE, so that copies stay separate nodes."""
    with joint_graph.without_cse():
        yield joint_graph.each_expression_once(module)


def with_whole_forward(joint: joint_graph.Joint) -> joint_graph.Joint:
    """The joint graph in which all nodes before the backward count as computed in the forward.

    Otherwise the nodes of the first of two backwards, and a loss that is not returned, would seem to take no memory in the forward.
    """
    info = joint.info
    nodes = list(joint.module.graph.nodes)
    first = next((k for k, node in enumerate(nodes) if node in info.tangents_closure), 0)
    before = [node for k, node in enumerate(nodes) if k < first or info.is_required_fw(node)]
    claimed_nodes, kinds = frozenset(before), type(info.unclaimed_nodes)
    claimed = replace(
        info,
        _required_fw_nodes=kinds(before),
        unclaimed_nodes=kinds(n for n in info.unclaimed_nodes if n not in claimed_nodes),
        fw_order={node: k for k, node in enumerate(before)},
    )
    return replace(joint, info=claimed)


def _gradient_call(node: fx.Node) -> str:
    """The name of the gradient call that a node comes from; empty if there is none."""
    stack = node.meta.get("source_fn_stack") or ()
    name, function = stack[-1] if stack else ("", None)
    return name if function in GRADIENT_CALLS or getattr(function, "__name__", "") == FUNCTORCH_CALL else ""


def merged(
    inner: InnerBackward, forward: fx.GraphModule, backward: fx.GraphModule, steps: Iterable[str]
) -> fx.GraphModule:
    """Merge the forward and backward of a joint graph, and the rest of the original after them, into one graph.

    Nodes that the backward recomputes stand just before their first reader.

    Args:
        steps: Names of the nodes that are in the backward under every plan; other nodes are placed right before a step needs them.
    """
    graph, own, by_name = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    inputs = (module.graph.find_nodes(op="placeholder") for module in (inner.original, inner.module))
    for given, primal in zip(*inputs, strict=True):
        own[given] = by_name[primal.name] = graph.node_copy(given)
    env: dict[fx.Node, fx.Node] = {}
    for node in forward.graph.nodes:
        if node.op == "placeholder":
            env[node] = by_name[node.name]
        elif node.op != "output":
            env[node] = by_name[node.name] = graph.node_copy(node, env.__getitem__)
    first = _returned(forward, env)[: inner.num_fwd_outputs]
    second = _append(graph, backward, by_name, frozenset(steps))
    own |= zip(inner.kept, [*first, *second], strict=True)
    for node in inner.rest:
        own[node] = graph.node_copy(node, own.__getitem__)
    module = fx.GraphModule(inner.original, graph)
    module.meta.update(inner.original.meta)
    return joint_graph.with_parts_up(module)


def _append(
    graph: fx.Graph, backward: fx.GraphModule, by_name: dict[str, fx.Node], steps: frozenset[str]
) -> list[fx.Node]:
    """Append a backward's nodes in the order in which its steps need them; returns the nodes of its outputs."""
    place = {node: k for k, node in enumerate(backward.graph.nodes)}
    env = {node: by_name[node.name] for node in backward.graph.find_nodes(op="placeholder")}
    for step in backward.graph.nodes:
        if step.op != "output" and step.name not in steps:
            continue
        missing, stack = set[fx.Node](), [step] if step.op != "output" else list(step.all_input_nodes)
        while stack:
            node = stack.pop()
            if node not in env and node not in missing:
                missing.add(node)
                stack.extend(node.all_input_nodes)
        for node in sorted(missing, key=place.__getitem__):
            env[node] = graph.node_copy(node, env.__getitem__)
    return _returned(backward, env)


def _returned(module: fx.GraphModule, env: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, list | tuple)
    return [env[node] for node in outputs if isinstance(node, fx.Node)]
