"""The buffers that each fused expression loads, as Inductor counts them.

Inductor counts operations as well (``config.realize_opcount_threshold``).  These are not counted here: a value that is written for
them alone is seen when a plan's graphs are lowered.
"""

from __future__ import annotations

from collections.abc import Iterable

from compile_remat._torch.codegen_rules import InductorRules
from compile_remat.passes.graph.node_drafts import Draft, Expression


def load_of(draft: Draft) -> Expression:
    """The expression that loads a node from memory."""
    return Expression(frozenset({draft.node.name}))


def own_expression(draft: Draft, rules: InductorRules) -> Expression:
    """What a node computes itself of what it reads."""
    return Expression(frozenset(name for name, _ in draft.input_reads), op_name(draft) in rules.heavy_ops)


def joined(draft: Draft, parts: Iterable[Expression]) -> Expression:
    """A node's expression, made of its own and of the expressions of what it reads."""
    expressions = [draft.own_expression, *parts]
    return Expression(
        frozenset().union(*(each.reads for each in expressions)), any(each.has_heavy for each in expressions)
    )


def op_name(draft: Draft) -> str:
    """The operator's name without namespace and overload."""
    target = draft.op.target
    return target.split(".")[1] if "." in target else target


def is_written(expression: Expression, is_reused: bool, rules: InductorRules) -> bool:
    """Whether Inductor writes the value of an expression to memory for the number of buffers that it loads.

    Args:
        is_reused: Whether several nodes read the value.
    """
    num_reads = len(expression.reads)
    return num_reads > rules.max_reads or (
        is_reused and (num_reads > rules.max_reads_if_reused or expression.has_heavy)
    )
