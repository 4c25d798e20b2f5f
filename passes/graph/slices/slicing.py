"""The rewrite: a region of a joint graph becomes one sliced call in the forward and one in the backward, or one for both.

Of two calls, the backward's recomputes the nodes of the region's forward that it needs, slice by slice.  Only the small tensors at
the region's edges pass from one call to the other: maxima and sums of a softmax, losses of tokens.  So no gradient is computed
before its tangent is known, and results equal those of the whole graph up to the order in which rows are added.

One call computes each slice's gradients behind its forward, for an incoming gradient of 1, and the backward multiplies them by the
one number that comes in (`factors`).
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat._torch.operators import call
from compile_remat.cost_models import OpKind, is_view, op_kind
from compile_remat.passes.graph.slices.bodies import Loop, body_of, joined_shape, sum_dtype
from compile_remat.passes.graph.slices.calls import run_slices
from compile_remat.passes.graph.slices.factors import Factor, factor_of, scaled
from compile_remat.passes.graph.slices.regions import NotSliced, Region, nbytes_of, region_of
from compile_remat.passes.graph.slices.row_rules import NotByRows, Rows, needs, shape_of, summed
from compile_remat.passes.graph.views import fake_mode_of, root_of

ALIGNED_ROWS = 16

BODY = "sliced_body_"
"""Prefix, before a number, of the attribute names under which a joint graph holds the bodies."""


def slice_region(joint: joint_graph.Joint, seed: fx.Node, slices: int, *, at_once: bool = False) -> NotSliced | None:
    """Compute the region of a product in slices, in place; returns the reason if that is impossible, else None.

    Args:
        slices: Number of slices, at most one for each row.
        at_once: True to compute the gradients in the forward, so that the backward only scales them.
    """
    region = region_of(joint, seed, at_once=at_once)
    if isinstance(region, NotSliced):
        return region
    factor = None
    try:
        if at_once:
            loops = [_loop_of(joint, region, None, frozenset())]
            factor = factor_of(joint, loops[0])
        else:
            later = _loop_of(joint, region, False, frozenset())
            loops = [_loop_of(joint, region, True, frozenset(later.operands)), later]
        _check_inputs(joint, loops, at_once)
    except NotByRows as reason:
        return NotSliced(seed.name, nbytes_of(seed), str(reason))
    length = _slice_rows(region, slices)
    if factor is not None:
        loops = [_for_one(joint.module.graph, loops[0], factor)]
    for loop in reversed(loops):  # the later loop reads nodes of the first loop, so the later one is replaced first
        if loop.joined or loop.sums:
            _replace(joint.module, loop, region.rows, length, factor)
    sort_by_data(joint.module.graph, _of_forward(joint) if at_once else frozenset())
    joint.module.graph.eliminate_dead_code()
    joint.module.recompile()
    return None


def _check_inputs(joint: joint_graph.Joint, loops: list[Loop], at_once: bool) -> None:
    """Check that slices read what the forward read.

    Raises:
        NotByRows: They may not.
    """
    overwritten = joint_graph.mutated_inputs(joint)
    if at_once and overwritten:  # nodes are put in another order
        raise NotByRows("the forward overwrites an input")
    if any(root_of(operand) in overwritten for loop in loops for operand in loop.operands):
        raise NotByRows("the forward overwrites an input that the slices read")


def _slice_rows(region: Region, slices: int) -> int:
    """Rows of a slice: a multiple of 16, except short slices on CPUs, so that slices begin where kernels can load whole vectors."""
    rows = -(-region.rows // min(slices, region.rows))
    is_on_cpu = region.seed.meta["val"].device.type == "cpu"
    return rows if rows <= ALIGNED_ROWS and is_on_cpu else -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS


# -- nodes of the two loops -------------------------------------------------------------------------------------------


def _loop_of(joint: joint_graph.Joint, region: Region, in_forward: bool | None, read_later: frozenset[fx.Node]) -> Loop:
    """The loop of a region's forward, or that of its backward, which also holds the forward nodes that it recomputes.

    Args:
        in_forward: None for one loop of both.
        read_later: Operands of the other loop, whose rows this loop must return.
    """
    places = region.places | region.edges
    own = {n for n in (*places, *region.sums) if in_forward in (None, joint.info.is_required_fw(n))}
    nodes, stack = set(own), list(own)
    while stack:
        node = stack.pop()
        for source, place in _places_read(node, region, places).items():
            is_inside = source in region.places and region.is_large(source)
            if source in nodes or not (is_inside or _is_constant(source, region) or _is_view_of(source, place)):
                continue
            if place is not None:
                places.setdefault(source, place)
            nodes.add(source)
            stack.append(source)
    joined = {n for n in own - set(region.sums) if n in read_later or _is_read_outside(n, region, own)}
    ordered = [n for n in joint.module.graph.nodes if n in nodes]
    operands: dict[fx.Node, Rows | None] = {}
    for node in ordered:
        for source, place in _places_read(node, region, places).items():
            if source not in nodes:
                operands[source] = place
    known = places | {n: place for n, place in operands.items() if place is not None}
    return Loop(
        tuple(ordered),
        operands,
        tuple(n for n in ordered if n in joined),
        tuple(n for n in ordered if n in own and n in region.sums),
        known,
    )


def _places_read(node: fx.Node, region: Region, places: Mapping[fx.Node, Rows]) -> dict[fx.Node, Rows | None]:
    """The dimensions of the rows in each operand of a node; None if every row reads the whole operand.

    Raises:
        NotByRows: An operand's rows are in other dimensions in `places`, or an operand is no tensor.
    """
    found: dict[fx.Node, Rows | None] = dict.fromkeys(node.all_input_nodes)
    if node in places:
        found |= needs(node, places[node])
    elif node in region.sums:
        found |= {x: places[x] for x in found if x in places} | summed(node)
    for source, place in found.items():
        shape_of(source)
        if source in places and places[source] != place:
            raise NotByRows(f"{node.name} reads other rows of {source.name}")
    return found


def _is_view_of(node: fx.Node, place: Rows | None) -> bool:
    """Returns whether a node is a view whose base can be the operand in its place, so that the view needs no memory of its own."""
    if node.op != "call_function" or not is_view(node) or len(node.all_input_nodes) != 1:
        return False
    if not isinstance(
        node.all_input_nodes[0].meta.get("val"), torch.Tensor
    ):  # each output of a multi-output view is an operand itself
        return False
    try:
        return place is None or needs(node, place)[node.all_input_nodes[0]] is not None
    except NotByRows:
        return False


def _is_constant(node: fx.Node, region: Region) -> bool:
    """Returns whether a node is a constant, or a view of constants, that all rows share."""
    if node.op != "call_function" or node in region.places or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    kind = op_kind(node)
    return kind is OpKind.CONSTANT or (
        kind is OpKind.VIEW and all(_is_constant(x, region) for x in node.all_input_nodes)
    )


def _is_read_outside(node: fx.Node, region: Region, own: set[fx.Node]) -> bool:
    """Returns whether a node has a reader outside its own loop; readers in the region do not count if they recompute the node."""
    readers = [user for user in node.users if user not in own]
    if region.is_large(node) and node in region.places:
        readers = [r for r in readers if r not in region.places and r not in region.edges and r not in region.sums]
    return bool(readers)


# -- the joint graph --------------------------------------------------------------------------------------------------


def _for_one(graph: fx.Graph, loop: Loop, factor: Factor) -> Loop:
    """Returns the loop after its nodes are made to read what they would read if the factor were 1."""
    value = factor.node.meta["val"]
    with fake_mode_of(value), graph.inserting_before(factor.node.next):
        one = call(graph, torch.ops.aten.full.default, ([], 1), {"dtype": value.dtype, "device": value.device})
    copies = {factor.node: one}
    for node in factor.chain:
        with graph.inserting_before(node.next):
            copy = graph.node_copy(node, lambda x: copies.get(x, x))
        copy.meta = {k: v for k, v in node.meta.items() if k not in OWN}
        copy.meta["val"] = node.meta["val"]
        copies[node] = copy
    for node in loop.nodes:
        for operand in [x for x in node.all_input_nodes if x in copies]:
            node.replace_input_with(operand, copies[operand])
    operands = {copies.get(node, node): place for node, place in loop.operands.items()}
    places = {copies.get(node, node): place for node, place in loop.places.items()}
    return replace(loop, operands=operands, places=places)


def _of_forward(joint: joint_graph.Joint) -> frozenset[fx.Node]:
    """The graph's inputs, the nodes that the forward's outputs are computed from, and the other results of their sliced calls."""
    graph = joint.module.graph
    returned: Any = graph.output_node().args[0]
    pending = [node for node in returned[: joint.num_fwd_outputs] if isinstance(node, fx.Node)]
    found = set(graph.find_nodes(op="placeholder"))
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
            pending += node.users if node.target is run_slices else ()
    return frozenset(found)


OWN = ("val", "tensor_meta", "recompute", "desc", "partitioner_tag")
"""Entries of a node's meta that are not for nodes that take its place."""


def _replace(module: fx.GraphModule, loop: Loop, rows: int, length: int, factor: Factor | None) -> None:
    """Put a sliced call after a loop's nodes and let all readers of these nodes read the call's results.

    Args:
        factor: The number that results are multiplied by, if the loop computes them for 1.
    """
    graph, last = module.graph, loop.nodes[-1]
    meta = {k: v for k, v in last.meta.items() if k not in OWN}
    value = next(n.meta["val"] for n in loop.nodes if isinstance(n.meta["val"], torch.Tensor))
    with fake_mode_of(value), _Inserter(graph, last, meta) as insert:
        given = [_flat(insert, x, place) for x, place in loop.operands.items()]
        body = insert.attribute(module, body_of(loop, given, length))
        rest = insert.attribute(module, body_of(loop, given, rows % length)) if rows % length else None
        dims = tuple(-1 if place is None else place.start for place in loop.operands.values())
        joined = tuple(loop.places[node].start for node in loop.joined)
        made = insert.node(graph.call_function(run_slices, (body, rest, rows, length, dims, joined, *given)))
        made.meta["val"] = (
            *(_joined_value(n, loop.places[n], rows) for n in loop.joined),
            *(torch.empty(n.meta["val"].shape, dtype=sum_dtype(n), device=value.device) for n in loop.sums),
        )
        for k, node in enumerate((*loop.joined, *loop.sums)):
            result = _result(insert, made, k, node)
            if factor is not None and node in factor.results:
                result = scaled(insert.call, result, factor.node)
            node.replace_all_uses_with(result)


class _Inserter:
    """Context manager that inserts nodes after one node, each with its value and with the meta that they share."""

    def __init__(self, graph: fx.Graph, after: fx.Node, meta: dict[str, Any]) -> None:
        self.graph, self.meta = graph, meta
        self.point = graph.inserting_before(after.next)

    def __enter__(self) -> _Inserter:
        self.point.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.point.__exit__(*error)

    def node(self, node: fx.Node) -> fx.Node:
        """Add the shared meta to a node; its own entries take precedence."""
        node.meta = {**self.meta, **node.meta}
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Insert a call of `target`."""
        return self.node(call(self.graph, target, args))

    def attribute(self, module: fx.GraphModule, body: fx.GraphModule) -> fx.Node:
        """Add `body` to `module` as a submodule, and insert the ``get_attr`` node of it."""
        name = next(f"{BODY}{k}" for k in range(len(module._modules) + 1) if not hasattr(module, f"{BODY}{k}"))
        module.add_submodule(name, body)
        return self.node(self.graph.get_attr(name))


def _flat(insert: _Inserter, node: fx.Node, place: Rows | None) -> fx.Node:
    """A view of an operand with its rows in one dimension; a contiguous copy is viewed if the strides allow no view."""
    if place is None or place.length == 1:
        return node
    shape = joined_shape(node, place, math.prod(node.meta["val"].shape[place.start : place.start + place.length]))
    try:
        return insert.call(torch.ops.aten.view.default, node, shape)
    except (RuntimeError, ValueError):  # the strides allow no view
        insert.graph.erase_node(next(iter(reversed(node.users))))
        copy = insert.node(call(insert.graph, torch.ops.aten.clone.default, (node,), _CONTIGUOUS))
        return insert.call(torch.ops.aten.view.default, copy, shape)


_CONTIGUOUS = {"memory_format": torch.contiguous_format}


def _joined_value(node: fx.Node, place: Rows, rows: int) -> torch.Tensor:
    value = node.meta["val"]
    return torch.empty(joined_shape(node, place, rows), dtype=value.dtype, device=value.device)


def _result(insert: _Inserter, made: fx.Node, k: int, node: fx.Node) -> fx.Node:
    """The k-th result of a sliced call, converted to the dtype and sizes of the node that it replaces."""
    result, value = insert.call(operator.getitem, made, k), node.meta["val"]
    if result.meta["val"].dtype is not value.dtype:
        result = insert.call(torch.ops.prims.convert_element_type.default, result, value.dtype)
    if result.meta["val"].shape != value.shape:
        result = insert.call(torch.ops.aten.view.default, result, list(value.shape))
    return result


def sort_by_data(graph: fx.Graph, first: Collection[fx.Node] = ()) -> None:
    """Sort the nodes topologically, in place; ties keep the present order, but for the nodes in `first`, which precede others."""
    nodes = list(graph.nodes)
    index = {node: k - len(nodes) * (node in first) for k, node in enumerate(nodes)}
    waiting = {node: len(node.all_input_nodes) for node in nodes}
    ready = [index[node] for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    place = graph._root
    while ready:
        node = nodes[heapq.heappop(ready)]
        place.append(node)
        place = node
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, index[user])
