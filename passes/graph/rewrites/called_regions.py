"""Inlines regions that a program calls (``torch.compiler.nested_compile_region``), as Inductor compiles each region only once.

Dynamo (2.11 to 2.15) leaves each call as a node ``invoke_subgraph(body, identifier, *operands)``, whose value is a tuple.
AOTAutograd partitions the body by itself, so no plan of the outer graph saves or recomputes a value inside, and no liveness of
the outer graph counts the buffers of a body.  Under a budget, the bodies therefore replace the calls.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from compile_remat.passes.graph.rewrites.contract import Rewritten

_COUNT = "compile_remat inlined calls"


def calls_regions(module: fx.GraphModule) -> bool:
    """Returns whether the program calls regions.

    A region's forward returns inputs that its backward needs as outputs.  Inductor (2.13) does not see that such an output is the
    input's memory: plain torch.compile reuses this memory for a later buffer of that size, and gradients are silently wrong.
    """
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    return any(graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph) for graph in graphs)


def inline_regions(module: fx.GraphModule) -> Rewritten:
    """Replace each call of a region by the region's body, in place, also inside of bodies and of other operators' graphs.

    A region with a configuration of its own (``nested_compile_region(options=...)``) stays a call.

    Returns:
        The number of calls that were replaced, those inside of bodies included.
    """
    inside = [inline_regions(child).count for child in module.children() if isinstance(child, fx.GraphModule)]
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    inlined = [call for call in calls if not _body(module, call).meta.get("nested_region_config")]
    for call in inlined:
        _inline(module, call)
    if inlined:
        module.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
        module.recompile()
    module.meta[_COUNT] = inlined_calls(module) + len(inlined)
    return Rewritten(sum(inside) + len(inlined))


def inlined_calls(module: fx.GraphModule) -> int:
    """The number of calls that `inline_regions` replaced."""
    return int(module.meta.get(_COUNT, 0))


def _body(module: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    body = module.get_submodule(_name(call))
    assert isinstance(body, fx.GraphModule)
    return body


def _name(call: fx.Node) -> str:
    attribute = call.args[0]
    assert isinstance(attribute, fx.Node)
    return str(attribute.target)


def _inline(module: fx.GraphModule, call: fx.Node) -> None:
    body, name = _body(module, call), _name(call)
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    with module.graph.inserting_before(call):
        outputs: Any = module.graph.graph_copy(body.graph, copies)
    for node in body.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            copies[node].target = f"{name}.{node.target}"
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(outputs[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(call)
