"""Kernels that read a node, estimated on a joint graph that has no plan yet.

Inductor computes a pointwise node in the kernels of its readers, unless the node reads too many buffers or an unfused kernel reads
the node.  `lowering.materialisation` follows the same rules in more detail for a `Problem`; rewrites run before it is built.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import fx

from compile_remat._torch.codegen_rules import RulesOf, inductor_rules
from compile_remat._torch.delivery.delivery_ops import DELIVER, GRADIENT_READY
from compile_remat.cost_models import FUSED_KINDS, OpKind, op_kind
from compile_remat.passes.graph.views import is_part, may_alias, most_users, readers_of, root_of

ENDS = (DELIVER, GRADIENT_READY)
"""Operators through which a gradient leaves the graph."""


def readers_of_memory(*nodes: fx.Node) -> list[fx.Node]:
    """Nodes that read the memory of `nodes`, also through views and `may_alias` nodes; `ENDS` and the output node do not count."""
    found, pending = dict[fx.Node, None](), list(nodes)
    while pending:
        for user in pending.pop().users:
            if user.op == "output" or user.target in ENDS or user in found:
                continue
            found[user] = None
            if op_kind(user) is OpKind.VIEW or is_part(user) or may_alias(user):
                pending.append(user)
    return list(found)


def inlined_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Pointwise nodes that Inductor computes in the kernels of their readers, judged by the number of buffers that they read."""
    found: set[fx.Node] = set()
    reads: dict[fx.Node, frozenset[fx.Node]] = {}
    rules = functools.cache(inductor_rules)
    for node in graph.nodes:
        if node.op == "call_function" and op_kind(node) is OpKind.POINTWISE:
            sources = {root_of(read) for read in node.all_input_nodes}
            whole = frozenset[fx.Node]().union(*(reads.get(source, {source}) for source in sources))
            readers = (reader for reader in readers_of(node) if reader.op != "output" and reader.target not in ENDS)
            if all(op_kind(reader) in FUSED_KINDS for reader in readers) and len(whole) <= _most_reads(node, rules):
                found.add(node)
                reads[node] = whole
    return found


def _most_reads(node: fx.Node, rules: RulesOf) -> int:
    """The most buffers that a pointwise node may read without being written to memory itself."""
    value = node.meta.get("val")
    own = rules(value.device.type if isinstance(value, torch.Tensor) else "cpu")
    return own.max_reads if most_users(node) == 1 else own.max_reads_if_reused


def kernels_of(readers: Sequence[fx.Node], inlined: Collection[fx.Node]) -> list[fx.Node]:
    """Returns `readers` and, for each inlined node among them, the nodes whose kernels compute it."""
    found, pending = dict.fromkeys(readers), list(readers)
    while pending:
        node = pending.pop()
        more = [n for n in readers_of_memory(node) if n not in found] if node in inlined else []
        found |= dict.fromkeys(more)
        pending += more
    return list(found)
