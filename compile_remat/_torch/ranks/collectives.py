"""Collectives in a graph: their kinds, bytes and ranks.  Imports nothing of compile_remat.

Private names, the same in 2.11 to 2.15: the operators of ``torch.ops._c10d_functional`` and ``torch.ops._dtensor``, whose last
argument names a process group, and ``torch.distributed.distributed_c10d._resolve_process_group``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_NAMESPACES = ("_c10d_functional", "_dtensor", "c10d_functional")
WAIT = "wait_tensor"


@dataclass(frozen=True)
class Collective:
    """A node that communicates with other ranks.

    Attributes:
        name: Name of the node.
        operator: Name without namespace and overload, such as ``all_reduce``; `WAIT` if the node only waits for another collective.
        nbytes: Bytes of the whole tensor: the largest of the inputs and outputs; 0 for `WAIT`.
        ranks: Numbers, in the default process group, of the ranks that take part; empty for `WAIT`.
    """

    name: str
    operator: str
    nbytes: int
    ranks: tuple[int, ...]


def collectives_of(graph: fx.Graph) -> Iterator[Collective]:
    """Yields the collectives of a graph; iterate while the graph's process groups exist."""
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _NAMESPACES:
            continue
        operator = str(target.overloadpacket.__name__)
        if operator == WAIT:
            yield Collective(node.name, operator, 0, ())
            continue
        tensors = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
        nbytes = max((_nbytes(value) for value in tensors), default=0)
        yield Collective(node.name, operator, nbytes, _ranks_of(node.args[-1]))


def _ranks_of(group_name: Any) -> tuple[int, ...]:
    distributed: Any = torch.distributed.distributed_c10d
    group = distributed._resolve_process_group(group_name)
    return tuple(torch.distributed.get_process_group_ranks(group))


def _nbytes(value: Any) -> int:
    values = value if isinstance(value, list | tuple) else [value]
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
