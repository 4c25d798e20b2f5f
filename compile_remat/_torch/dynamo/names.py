"""Names what Dynamo compiles, as its author would: the class of a module, or the name of a function.

Private names of torch, the same in 2.11, 2.13 and 2.15: the local variables `code` and `locals` of ``convert_frame._compile``,
which is on the stack while a backend runs.  Where they are missing, the modules that the graph's nodes come from give the name.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch
from torch import fx, nn

WRAPPED = "fn"
"""The argument under which Dynamo traces a callable that has no frame of its own, such as an ``nn.Sequential``."""


def compiled_name(graph: fx.Graph) -> str:
    """Returns the class of the module whose `forward` is compiled, such as ``GPT``, or of the only module that a function calls.

    A function that calls several modules, or none, has its own name; without a frame of Dynamo's on the stack the compile id of
    torch's logs stands in for it, ``graph 0/0``, and outside of any compilation the name is empty.
    """
    code, arguments = _frame_being_compiled()
    for name in ("self", WRAPPED):
        if isinstance(arguments.get(name), nn.Module):
            return type(arguments[name]).__name__
    called = _outermost_modules(graph)
    if len(called) == 1:
        return next(iter(called.values()))
    if code is not None:
        return code.co_qualname.rpartition("<locals>.")[2]
    compile_id = torch._guards.CompileContext.current_compile_id()
    return "" if compile_id is None else f"graph {compile_id}"


def _outermost_modules(graph: fx.Graph) -> dict[str, str]:
    """Returns the class names of the modules that the compiled function calls itself, by their paths."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if stack:
            path, kind = next(iter(stack.values()))
            found[str(path)] = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
    return found


def _frame_being_compiled() -> tuple[CodeType | None, dict[str, object]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            code, arguments = frame.f_locals.get("code"), frame.f_locals.get("locals")
            if isinstance(code, CodeType) and isinstance(arguments, dict):
                return code, arguments
        frame = frame.f_back
    return None, {}
