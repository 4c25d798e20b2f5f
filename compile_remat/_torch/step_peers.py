"""Whether Dynamo says that other graphs will run in the step of a graph.

Where Dynamo breaks a function into several graphs, it records on each of them why it ended (a private attribute of the graph
module, same in 2.11, 2.13 and 2.15).  The graphs behind a break need no such mark: when Dynamo compiles the function in which it
resumes, the calls of the earlier graphs are in flight.  Callables that were compiled separately are unknown to each other:
`runtime.shared_budget` learns from their first step that they share it.
"""

from __future__ import annotations

from torch import fx


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether the function that the graph was traced from goes on after it, so that more graphs may follow."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))
