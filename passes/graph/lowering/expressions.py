"""The buffers that each fused expression loads, as Inductor counts them.

Inductor counts operations as well (``config.realize_opcount_threshold``).  Operations are not counted here: a value that is written
to memory for their number alone is observed when a plan's graphs are lowered.
"""

from __future__ import annotations

from collections.abc import Iterable

from compile_remat._torch.codegen_rules import InductorRules
from compile_remat.passes.graph.node_drafts import Draft, Expression


def load_of(draft: Draft) -> Expression:
    """The expression that loads a node from memory."""
    return Expression(frozenset({draft.node.name}))


def own_expression(draft: Draft, rules: InductorRules) -> Expression:
    """The expression of a node's own operator, with the graph inputs that it loads."""
    return Expression(frozenset(name for name, _ in draft.input_reads), op_name(draft) in rules.heavy_ops)


def joined(draft: Draft, parts: Iterable[Expression]) -> Expression:
    """The fused expression of a node: its own expression joined with `parts`, the expressions of its sources."""
    expressions = [draft.own_expression, *parts]
    return Expression(
        frozenset().union(*(each.reads for each in expressions)), any(each.has_heavy for each in expressions)
    )


def op_name(draft: Draft) -> str:
    """The operator's name without namespace and overload."""
    target = draft.op.target
    return target.split(".")[1] if "." in target else target


def is_written(expression: Expression, is_reused: bool, rules: InductorRules) -> bool:
    """Returns whether Inductor writes the value of an expression to memory because of the number of buffers that it loads.

    Args:
        is_reused: True if several nodes read the value; then a heavy operator is a reason as well.
    """
    num_reads = len(expression.reads)
    return num_reads > rules.max_reads or (
        is_reused and (num_reads > rules.max_reads_if_reused or expression.has_heavy)
    )
