"""Names what Dynamo compiles, as its author would: the class of a module, or the name of a function.

Private names of torch, the same in 2.11, 2.13 and 2.15: the local variables `code` and `locals` of ``convert_frame._compile``,
which is on the stack while a backend runs; the function of ``eval_frame`` that calls a compiled function, `compile_wrapper` or
`_fn`; and ``Module._call_impl``, which calls a forward.  Where they are missing, the modules that the graph's nodes come from give
the name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType

import torch
from torch import fx, nn

WRAPPED = "fn"
"""The argument under which Dynamo traces a callable that has no frame of its own, such as an ``nn.Sequential``."""

COMPILED_CALLS = ("compile_wrapper", "_fn")


def compiled_name(graph: fx.Graph) -> str:
    """Returns the class of the module whose `forward` is compiled, such as ``GPT``, or of the only module that a function calls.

    A class of the user's goes before one of torch's: the graph of a part that is torch's own, such as an ``nn.Linear`` behind a
    graph break, has the class of the module around it, and ``DataParallel`` that of the module inside.  A function that calls
    several modules, or none, has its own name; without a frame of Dynamo's on the stack the compile id of torch's logs stands in
    for it, ``graph 0/0``, and outside of any compilation the name is empty.
    """
    frame = _frame_of_dynamo()
    code, arguments = (None, {}) if frame is None else _being_compiled(frame)
    owner = _owner(code, arguments)
    called = [] if owner is None else [owner]
    called += _calls_around(frame)
    if called:
        classes = [type(_unwrapped(module)) for module in called]
        return next((kind for kind in classes if not _is_torchs(kind)), classes[0]).__name__
    outermost = _outermost_modules(graph)
    if len(outermost) == 1:
        return next(iter(outermost.values()))
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


def _frame_of_dynamo() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            return frame
        frame = frame.f_back
    return None


def _being_compiled(frame: FrameType) -> tuple[CodeType | None, dict[str, object]]:
    code, arguments = frame.f_locals.get("code"), frame.f_locals.get("locals")
    return (code, arguments) if isinstance(code, CodeType) and isinstance(arguments, dict) else (None, {})


def _owner(code: CodeType | None, arguments: dict[str, object]) -> nn.Module | None:
    """Returns the module of which the compiled code is a method, whatever its author calls `self`."""
    for name in ("self", WRAPPED):
        if isinstance(module := arguments.get(name), nn.Module):
            return module
    if code is not None and code.co_argcount:
        first = arguments.get(code.co_varnames[0])
        method = getattr(getattr(type(first), code.co_name, None), "__code__", None)
        if isinstance(first, nn.Module) and method is not None and _place(method) == _place(code):
            return first
    return None


def _place(code: CodeType) -> tuple[str, int]:
    """Returns file and line of code, which a copy of it has too."""
    return code.co_filename, code.co_firstlineno


def _calls_around(frame: FrameType | None) -> Iterator[nn.Module]:
    """Yields the modules whose calls are active inside of the call of the compiled function, from the inside out."""
    while frame is not None:
        code, place = frame.f_code, frame.f_globals.get("__name__")
        if code.co_name in COMPILED_CALLS and place == "torch._dynamo.eval_frame":
            return
        if code.co_name == "_call_impl" and isinstance(module := frame.f_locals.get("self"), nn.Module):
            yield module
        frame = frame.f_back


def _unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside of a wrapper of torch's, such as ``DataParallel``."""
    while _is_torchs(type(module)) and isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"
