"""The default process group's store, and which piece of the user's code Dynamo compiles now.

Private names, the same in 2.11 to 2.15: ``torch.distributed.distributed_c10d._get_default_store``,
``torch._guards.TracingContext.traced_code`` and ``CompileContext.current_compile_id``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext, TracingContext


@dataclass(frozen=True)
class Frame:
    """One compilation of Dynamo's.

    Attributes:
        code: The function in words that are the same in all processes: its name, its file's name and its line.
        variant: How many variants of it were compiled before.
    """

    code: str
    variant: int


def default_store() -> Any:
    """The store of the default process group; None where no other process trains with this one."""
    return None if num_ranks() == 1 else torch.distributed.distributed_c10d._get_default_store()


def prefixed(store: Any, prefix: str) -> Any:
    """The same store with a prefix before each key."""
    return torch.distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def num_ranks() -> int:
    """How many processes train together: those of the default process group, or this one alone.

    Behind the backend ``fake`` there are none: one process stands for all ranks.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_backend() == "fake":
        return 1
    return distributed.get_world_size()


def own_rank() -> int:
    """This process's number in the default process group."""
    return torch.distributed.get_rank()


def communicates(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a Dynamo graph may wait for other ranks: it calls collectives, or takes tensors whose operators do."""
    if any(hasattr(t, "device_mesh") for t in example_inputs):
        return True
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(_is_distributed(node.target) for graph in graphs for node in graph.nodes)


def _is_distributed(target: Any) -> bool:
    module = str(getattr(target, "__module__", ""))
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        module = str(target)
    return module.startswith(("torch.distributed", "_c10d_functional", "c10d", "_dtensor", "symm_mem"))


def current_frame() -> Frame:
    """What Dynamo compiles; without a name where it compiles nothing now."""
    context, compile_id = TracingContext.try_get(), CompileContext.current_compile_id()
    codes = [] if context is None else context.traced_code
    variant = 0 if compile_id is None or compile_id.frame_compile_id is None else compile_id.frame_compile_id
    if not codes:
        return Frame("", variant)
    first = codes[0]
    return Frame(f"{first.co_qualname} ({os.path.basename(first.co_filename)}:{first.co_firstlineno})", variant)
