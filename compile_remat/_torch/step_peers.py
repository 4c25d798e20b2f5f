"""What surrounds a graph that Dynamo hands over: whether other compiled graphs are to be expected in the same step.

Private names of torch, same in 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule, cached_backends

_CALLED = "_remat_was_called"


def company(gm: fx.GraphModule) -> str:
    """Why this graph will not be alone in its step, in words; empty where nothing says so.

    To be asked once for each graph, while Dynamo compiles it.
    """
    wrapper, modules = _callers()
    others = _others_waiting(wrapper)
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        return "it ends in a graph break"
    if len(modules) > 1:
        return f"it is compiled inside of a {type(modules[-1]).__name__}"
    if others:
        return "something else is compiled with this backend, too"
    return ""


def _callers() -> tuple[Any, list[nn.Module]]:
    """What torch.compile made for this graph, and the modules that are being called, innermost first."""
    wrapper: Any = None
    modules: list[nn.Module] = []
    for frame in _frames():
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if wrapper is None and isinstance(owner, torch._TorchCompileWrapper):
            wrapper = owner
        if name == "_call_impl" and isinstance(owner, nn.Module):
            module = owner._orig_mod if isinstance(owner, OptimizedModule) else owner
            if all(module is not m for m in modules):
                modules.append(module)
    return wrapper, modules


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _others_waiting(wrapper: Any) -> bool:
    """Whether torch.compile was called elsewhere for our backend, and what it made is still there and was not run yet."""
    if wrapper is None:
        return False
    wrapper.__dict__[_CALLED] = True
    waiting = [w for w in list(cached_backends.values()) if _is_waiting(w, wrapper.compiler_fn)]
    if not waiting:
        return False
    gc.collect()
    return any(_has_owner(made) for made in waiting)


def _is_waiting(made: Any, compiler_fn: Any) -> bool:
    return type(made) is torch._TorchCompileWrapper and made.compiler_fn is compiler_fn and _CALLED not in vars(made)


def _has_owner(made: Any) -> bool:
    """Whether anything but Dynamo's table, which keeps all that there ever were, and a running function refers to it."""
    mine = (FrameType, list)
    return any(owner is not cached_backends and not isinstance(owner, mine) for owner in gc.get_referrers(made))
