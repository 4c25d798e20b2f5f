"""Copies loop bodies: Inductor rewrites them while it makes code, and some rewrites may run only once.

Private names of ``torch._inductor``, same in 2.11 to 2.15: ``loop_body.LoopBody`` and its ``root_block``, ``subblocks`` and
``submodules``; ``LoopBodyBlock.clone``, ``.graph``; ``SchedulerNode._body``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import fx

from compile_remat._torch.version import private_name

LoopBody = private_name("torch._inductor.loop_body", "LoopBody")
BaseSchedulerNode = private_name("torch._inductor.scheduler", "BaseSchedulerNode")


def give_own_bodies(nodes: Iterable[Any]) -> None:
    """Replace the loop body of each scheduler node by a copy; `untouched` restores the original body."""
    for node in nodes:
        if isinstance(getattr(node, "_body", None), LoopBody):
            node._body = copied(node._body)


def nodes_in(*values: Any) -> list[Any]:
    """The single scheduler nodes in a nest of lists and of fused nodes."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += nodes_in(*value)
        elif isinstance(value, BaseSchedulerNode):
            found += value.get_nodes()
    return found


def copied(body: Any) -> Any:
    """A copy of a loop body, with FX graphs of its own."""
    new = copy.copy(body)
    for name in [name for name in vars(new) if name.endswith("_cache")]:
        delattr(new, name)
    new.root_block = _copied_block(body.root_block, new)
    new.subblocks = {name: _copied_block(block, new) for name, block in body.subblocks.items()}
    others = {name: part.clone(new) for name, part in body.submodules.items() if name != "get_index"}
    new.submodules = {"get_index": new.get_index, **others}
    return new


def _copied_block(block: Any, body: Any) -> Any:
    new = block.clone(body)
    new.graph = fx.Graph()
    new.graph.output(new.graph.graph_copy(block.graph, {}))
    return new
