"""Snapshots: copies of inputs that a backward reads in place of the inputs themselves.

Code outside of a graph may change an input between forward and backward: a loader refills its buffer, a teacher's weights move.
So the backward reads only the inputs that the backward of plain torch.compile reads (`readable_inputs`).  Each other input gets a
snapshot for the nodes that read it (`add_snapshots`): a value that a plan saves if it recomputes one of these nodes.  The forward
still reads the input.  While the modules of a plan are extracted, nodes read the snapshots that the plan saves
(`reading_snapshots`).

If a node reads an input through views, the smallest view is copied: the filled part of a bank, one matrix of three.

An output that the caller may change (`Joint.left_alone`) and that no backward may recompute has snapshots, too: random numbers
that are returned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import fx

from compile_remat._torch import joint_graph, sizes
from compile_remat._torch.fake import copied_value
from compile_remat._torch.joint_graph import ReadableInputs, Snapshot
from compile_remat.cost_models import OpKind, is_view, op_kind
from compile_remat.passes.graph.pins import must_be_saved
from compile_remat.passes.graph.rewrites.contract import RewrittenJoint
from compile_remat.passes.graph.views import is_part

RECOMPUTED = ("must_recompute", "prefer_recompute")
"""Tags of nodes in the user's checkpointed regions."""


def readable_inputs(joint: joint_graph.Joint, plain: Iterable[fx.Node]) -> ReadableInputs:
    """The inputs that the backward of plain torch.compile reads.

    Args:
        joint: The graph as torch gave it (`as_in_torch`), without rewrites.
        plain: The nodes that plain torch.compile saves (`joint_graph.plain_choice`).
    """
    runs = _run_by_backward(joint, frozenset(plain))
    by_all, by_tagged = set[str](), set[str]()
    for given in joint.module.graph.find_nodes(op="placeholder"):
        readers = [reader for reader, _ in _reads_of(given) if reader in runs]
        if not _may_change(joint, given) or any(not _is_tagged(joint, reader) for reader in readers):
            by_all.add(given.name)
        elif readers:
            by_tagged.add(given.name)
    return ReadableInputs(frozenset(by_all), frozenset(by_tagged))


def add_snapshots(joint: joint_graph.Joint) -> RewrittenJoint:
    """Add snapshots, in place, of inputs and outputs that the backward may not read; returns their number, and the graph with them.

    The nodes still read the input or output; `Joint.snapshots` holds the copies with their readers.
    """
    readable = joint.readable
    if readable is None:
        return RewrittenJoint(0, joint)
    runs = _run_by_backward(joint, frozenset())
    found: dict[fx.Node, list[tuple[fx.Node, tuple[fx.Node, ...]]]] = {}
    outputs = joint.left_alone.intersection(must_be_saved(joint)) if joint.left_alone else ()
    given_nodes = joint.module.graph.find_nodes(op="placeholder")
    for given in (*(n for n in given_nodes if n.name not in readable.by_all), *sorted(outputs)):
        for reader, path in _reads_of(given):
            is_spared = given.name in readable.by_tagged and _is_tagged(joint, reader)
            if reader in runs and not is_spared:
                at = _least(path)
                found.setdefault(path[at], []).append((reader, path[at:]))
    copies = tuple(_copied(joint, source, reads) for source, reads in found.items())
    return RewrittenJoint(len(copies), replace(joint, snapshots=copies))


def unreadable_inputs(joint: joint_graph.Joint, backward: fx.GraphModule) -> list[str]:
    """Names of the inputs that an extracted backward reads without permission; empty unless there is a bug."""
    if joint.readable is None:
        return []
    own = {n.name for n in joint.module.graph.find_nodes(op="placeholder")}
    read = [n.name for n in backward.graph.find_nodes(op="placeholder") if n.users and n.name in own]
    return [name for name in read if name not in joint.readable.names]


@contextmanager
def reading_snapshots(joint: joint_graph.Joint, saved: Collection[str]) -> Iterator[None]:
    """In this context, nodes of the joint graph read the snapshots in `saved`; `restore_forward` undoes it in a forward."""
    undo: list[tuple[fx.Node, fx.Node, fx.Node]] = []
    made: list[fx.Node] = []
    try:
        for copy in joint.snapshots:
            if copy.node.name in saved:
                for reader, path in copy.reads:
                    entry = _replayed(copy.node, path, made)
                    reader.replace_input_with(path[-1], entry)
                    undo.append((reader, entry, path[-1]))
        yield
    finally:
        for reader, entry, original in undo:
            reader.replace_input_with(entry, original)
        for node in reversed(made):
            joint.module.graph.erase_node(node)


def restore_forward(forward: fx.GraphModule, joint: joint_graph.Joint) -> None:
    """Let the nodes of an extracted forward read the inputs again; snapshots are computed at its end, when the least is alive."""
    names = {copy.node.name for copy in joint.snapshots}
    output = forward.graph.output_node()
    copies = [n for n in forward.graph.nodes if n.op == "call_function" and n.name in names]
    for node in copies:
        source = node.all_input_nodes[0]
        node.replace_all_uses_with(source, delete_user_cb=lambda user, own=output: user is not own)
        output.prepend(node)
    if copies:
        forward.recompile()


def _may_change(joint: joint_graph.Joint, given: fx.Node) -> bool:
    """Returns whether an input is a tensor that the caller may change: no tangent, size, seed, token or opaque object."""
    if given in joint.info.tangents_closure or not isinstance(given.meta.get("val"), torch.Tensor):
        return False
    return not joint_graph.is_state_of_runtime(given)


def _is_tagged(joint: joint_graph.Joint, node: fx.Node) -> bool:
    return joint.user_tags.get(node) in RECOMPUTED


def _run_by_backward(joint: joint_graph.Joint, saved: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes that a backward runs if the nodes in `saved` are saved; with `saved` empty, all nodes that a backward may run."""
    found = set[fx.Node]()
    for node in reversed(joint.module.graph.nodes):
        if node.op == "output":
            found.update(joint.bwd_outputs)
            continue
        if node in found or node in joint.info.tangents_closure:
            found.add(node)
            found.update(n for n in node.all_input_nodes if n not in saved)
    steps: set[fx.Node] = found & joint.info.tangents_closure
    return (found - set(saved)) | steps


def _reads_of(given: fx.Node) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """The nodes that read an input, each with the path of views from the input to the view that the node reads."""
    pending: list[tuple[fx.Node, ...]] = [(given,)]
    while pending:
        path = pending.pop()
        for user in path[-1].users:
            if user.op == "call_function" and path[-1] is user.all_input_nodes[0] and (is_view(user) or is_part(user)):
                pending.append((*path, user))
            elif user.op != "output" and op_kind(user) is not OpKind.SYMBOL:
                yield user, path


def _least(path: Sequence[fx.Node]) -> int:
    """Index of the first smallest tensor on a path of views, at or after the last ``as_strided``, which reads the storage."""
    first = max((k for k, n in enumerate(path) if n.target is torch.ops.aten.as_strided.default), default=0)
    tensors = [k for k in range(first, len(path)) if isinstance(path[k].meta.get("val"), torch.Tensor)]
    return min(tensors, key=lambda k: (_dense_nbytes(path[k]), k))


def _dense_nbytes(node: fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    nbytes = value.dtype.itemsize
    for size in sizes.hint_shape(value):
        nbytes *= size
    return nbytes


def _copied(
    joint: joint_graph.Joint, source: fx.Node, reads: Sequence[tuple[fx.Node, tuple[fx.Node, ...]]]
) -> Snapshot:
    first = min(reader for reader, _ in reads)  # fx.Node compares by position in the graph
    graph = joint.module.graph
    with graph.inserting_before(first):
        node = graph.create_node(
            "call_function", torch.ops.aten.clone.default, (source,), name=f"snapshot_of_{source.name}"
        )
    node.meta = {key: first.meta[key] for key in ("nn_module_stack", "stack_trace") if key in first.meta}
    node.meta |= {"val": copied_value(source.meta["val"])}
    return Snapshot(node, source, tuple(reads))


def _replayed(copy: fx.Node, path: Sequence[fx.Node], made: list[fx.Node]) -> fx.Node:
    """Rebuild a path of views on the copy and return its last node; new nodes are appended to `made`."""
    at = copy
    for view in path[1:]:
        with copy.graph.inserting_after(at):
            node = copy.graph.node_copy(view)
        node.replace_input_with(view.all_input_nodes[0], at)
        made.append(node)
        at = node
    return at
