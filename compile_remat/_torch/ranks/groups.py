"""The default process group's store, and the function of the user's code that Dynamo compiles now.

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
    """One compilation of a function by Dynamo.

    Attributes:
        code: The function's name, its file's name and its first line, as text that is the same in all processes.
        variant: Number of variants of the function that were compiled before.
    """

    code: str
    variant: int


def default_store() -> Any:
    """Returns the store of the default process group; None if no other process trains with this one."""
    return None if num_ranks() == 1 else torch.distributed.distributed_c10d._get_default_store()


def prefixed(store: Any, prefix: str) -> Any:
    """Returns a view of the store that puts a prefix before each key."""
    return torch.distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def num_ranks() -> int:
    """Returns the number of processes that train together: the size of the default process group, or 1 without a group.

    Returns 1 for the backend ``fake``, too, in which one process stands for all ranks.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_backend() == "fake":
        return 1
    return distributed.get_world_size()


def own_rank() -> int:
    """Returns this process's rank in the default process group."""
    return torch.distributed.get_rank()


def communicates(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Returns whether a Dynamo graph may wait for other ranks: if it calls collectives, or has DTensors as inputs."""
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
    """Returns the function that Dynamo compiles now; `Frame.code` is empty if Dynamo compiles none."""
    context, compile_id = TracingContext.try_get(), CompileContext.current_compile_id()
    codes = [] if context is None else context.traced_code
    variant = 0 if compile_id is None or compile_id.frame_compile_id is None else compile_id.frame_compile_id
    if not codes:
        return Frame("", variant)
    first = codes[0]
    return Frame(f"{first.co_qualname} ({os.path.basename(first.co_filename)}:{first.co_firstlineno})", variant)
