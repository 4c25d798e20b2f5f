"""Values that stay in memory in the backward although a plan leaves them one reader: else that one would be written in their stead.

Inductor writes a value to memory that reads several buffers and that two nodes read.  What one node reads is computed in the kernel
of that node.  A ResNet's first ReLU reads five buffers, and two nodes of the backward may read it: the pooling, and a comparison.
Where a plan saves what the pooling gives, the comparison alone does, and the gradient that it is for then reads six buffers:
Inductor writes that gradient to memory, in float32, twice as large as the ReLU.
"""

from __future__ import annotations

from torch import fx

from compile_remat._torch.codegen_rules import write_where_it_stands
from compile_remat.passes.graph.lowering.expressions import is_written, joined
from compile_remat.passes.graph.lowering.materialisation import KEPT
from compile_remat.passes.graph.node_drafts import Draft, DraftGraph, Expression
from compile_remat.passes.graph.views import most_users, readers_of
from compile_remat.passes.problem.problem import EXTERN, POINTWISE


def mark_kept_values(graph: DraftGraph) -> None:
    """Mark, for all plans, the values that one reader may not compute in its own expression: it would be written to memory itself.

    All values that are written for several readers alone are taken to have one at once, so that some are marked without need.
    """
    inlined: dict[Draft, Expression] = {}
    by_name: dict[str, Draft] = {}
    for draft in graph.by_node.values():
        rules, own = graph.rules_of(draft.node), draft.backward_expression
        inlined[draft] = own
        if draft.kernel != POINTWISE:
            continue
        whole = joined(draft, (inlined[source] for source in draft.sources))
        if draft.is_written_if_reused and not draft.in_backward:
            inlined[draft], by_name[draft.node.name] = whole, draft
        elif _is_read_by_unfused(draft, graph):
            inlined[draft] = Expression(reads=frozenset({draft.node.name}))
        elif draft.node.name not in own.reads:  # computed in its readers' expressions
            if is_written(whole, most_users(draft.node, graph.run_again) > 1, rules):
                for name in by_name.keys() & own.reads:
                    by_name[name].node.meta[KEPT] = True
            else:
                inlined[draft] = whole


def _is_read_by_unfused(draft: Draft, graph: DraftGraph) -> bool:
    """Whether a kernel that is not fused reads it, through views too: it is in memory then, whatever its expression."""
    drafts = graph.by_node
    return any(drafts[r].kernel == EXTERN for r in readers_of(draft.node) if r in drafts)


def write_kept_values(backward: fx.GraphModule) -> None:
    """Have Inductor write the marked values to memory that the backward of a plan reads once."""
    for node in backward.graph.nodes:
        if node.op == "call_function" and node.meta.get(KEPT) and most_users(node) == 1:
            write_where_it_stands(node)
