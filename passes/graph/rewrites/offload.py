"""Offload: saved tensors leave for the host in the forward of a plan, and come back in its backward.

`offload_saved` runs behind the extraction, as it changes both graphs: in place of the tensor, the forward returns its copy on the
host and the copy's ticket.  The backward fetches the tensor before the node that the plan names, and lets it arrive right before
its first reader.  `compile_remat._torch.offload` has the operators.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compile_remat._torch.offload.offload_ops import ARRIVE, FETCH, RELEASE, STASH
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.problem.plan import Offloaded

HOST, TICKET, FETCHED, ARRIVAL = "__host", "__ticket", "__fetched", "__arrival"
"""Suffixes of the names of nodes that belong to an offloaded value."""


def offload_saved(forward: fx.GraphModule, backward: fx.GraphModule, offloaded: Sequence[Offloaded]) -> Rewritten:
    """Let saved tensors wait for the backward on the host, in place; returns their number.

    Args:
        forward, backward: The modules of a plan that saves the tensors.
        offloaded: Fetches before one node stand in this order.

    Raises:
        ValueError: The forward does not compute a tensor, or does not hand it to the backward once, or a node is missing before
            which the plan releases or fetches it.
    """
    for value in offloaded:
        _send(forward, value)
        _bring_back(backward, value)
    if offloaded:
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
    return Rewritten(len(offloaded))


def _send(forward: fx.GraphModule, value: Offloaded) -> None:
    graph, output = forward.graph, forward.graph.output_node()
    node = _named(graph, value.name)
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    places = [place for place, each in enumerate(returned) if each is node]
    if node.op != "call_function" or len(places) != 1:
        raise ValueError(f"the plan offloads {value.name!r}, which the forward does not compute and hand over once")
    with graph.inserting_after(node):
        stash = graph.call_function(STASH, (node,))
    with graph.inserting_after(stash):
        ticket = graph.call_function(operator.getitem, (stash, 1))
    with graph.inserting_after(stash):
        host = graph.call_function(operator.getitem, (stash, 0))
    with graph.inserting_before(_named(graph, value.release_before) if value.release_before else output):
        release = graph.call_function(RELEASE, (node, ticket))
    _describe(node, host, ticket, stash, release)
    host.name = value.name + HOST
    ticket.name = value.name + TICKET
    returned[places[0] : places[0] + 1] = [host, ticket]
    output.args = (tuple(returned), *output.args[1:])
    descriptions = output.meta.get("desc")
    if descriptions is not None:
        output.meta["desc"] = [
            *descriptions[: places[0] + 1],
            descriptions[places[0]],
            *descriptions[places[0] + 1 :],
        ]


def _bring_back(backward: fx.GraphModule, value: Offloaded) -> None:
    graph = backward.graph
    given = _named(graph, value.name)
    if given.op != "placeholder" or not given.users:
        raise ValueError(f"the plan offloads {value.name!r}, which the backward is not given or does not read")
    first = min(given.users)
    before = _named(graph, value.fetch_before) if value.fetch_before else first
    fake: torch.Tensor = given.meta["val"]
    with graph.inserting_before(given):
        host = graph.placeholder(value.name + HOST)
        ticket = graph.placeholder(value.name + TICKET)
    with graph.inserting_before(min(before, first)):
        fetch = graph.call_function(FETCH, (host, ticket, fake.device))
        made = graph.call_function(operator.getitem, (fetch, 0))
        arrival = graph.call_function(operator.getitem, (fetch, 1))
    with graph.inserting_before(first):
        arrive = graph.call_function(ARRIVE, (made, host, arrival))
    given.replace_all_uses_with(arrive)
    graph.erase_node(given)
    _describe(given, host, ticket, None, None)
    for node in (made, arrive):
        node.meta = dict(given.meta)
    fetch.meta = {**given.meta, "val": (fake, ticket.meta["val"])}
    arrival.meta = {**given.meta, "val": ticket.meta["val"]}
    made.name = value.name + FETCHED
    arrival.name = value.name + ARRIVAL
    arrive.name = value.name


def _describe(given: fx.Node, host: fx.Node, ticket: fx.Node, stash: fx.Node | None, release: fx.Node | None) -> None:
    """Sets the ``meta`` of the nodes that stand for a tensor on the host, with fake tensors of the tensor's own mode."""
    fake: Any = given.meta["val"]
    with fake.fake_mode:
        values = STASH(fake)
    shared = {name: value for name, value in given.meta.items() if name != "tensor_meta"}
    for node, value in ((host, values[0]), (ticket, values[1]), (stash, values), (release, None)):
        if node is not None:
            node.meta = {**shared, "val": value}


def _named(graph: fx.Graph, name: str) -> fx.Node:
    node: fx.Node | None = next((each for each in graph.nodes if each.name == name), None)
    if node is None:
        raise ValueError(f"the plan offloads a value at {name!r}, which the graph does not have")
    return node
