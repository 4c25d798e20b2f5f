"""Trace one call with Dynamo and leave Dynamo's caches as they were.  Private names, same in 2.11, 2.13 and 2.15.

Dynamo keeps compiled graphs with the code object that it traced, counts them against ``recompile_limit``, and remembers the sizes
that it saw there (``torch._dynamo.pgo``).  So the outermost frame is traced on a copy of its code object, whose graphs are dropped
afterwards, and the sizes are restored.  Frames below it are traced on their own only after a graph break: from torch 2.13 on these
count apart (``isolate_recompiles``); in 2.11 and 2.12 they count as compilations of the functions that break.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn

from compile_remat._torch.version import private_module, private_name

dynamo_config = private_module("torch._dynamo.config")
get_code_state = private_name("torch._dynamo.pgo", "get_code_state")
reset_code = private_name("torch._dynamo.eval_frame", "reset_code")
trace_rules_check = private_name("torch._dynamo.trace_rules", "check")
wrap_inline = private_name("torch._dynamo.external_utils", "wrap_inline")


def trace_isolated(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    inputs: Sequence[Any],
    named: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Returns ``torch.compile(function, backend=backend)(*inputs, **named)``, as if no other compilation were in the process."""
    keywords: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        keywords["isolate_recompiles"] = True
    twin, code = _twin(function)
    try:
        with _own_sizes(), _uncollected():
            return torch.compile(twin, backend=backend, **keywords)(*inputs, **named)
    finally:
        if code is not None:  # the code and its graphs are a reference cycle that Python's collector does not see
            reset_code(code)


def _uncollected() -> AbstractContextManager[object]:
    """Returns a context in which Dynamo does not run Python's collector after a compilation: there is little to collect."""
    if not hasattr(dynamo_config, "run_gc_after_compile"):
        return nullcontext()
    patched: AbstractContextManager[object] = dynamo_config.patch(run_gc_after_compile=False)
    return patched


@contextmanager
def _own_sizes() -> Iterator[None]:
    """Hide the sizes that Dynamo has seen, and drop the sizes seen inside: a second size would make a dimension dynamic."""
    state = get_code_state()
    saved = dict(state)
    state.clear()
    try:
        yield
    finally:
        state.clear()
        state.update(saved)


def _twin(function: Callable[..., Any]) -> tuple[Callable[..., Any], CodeType | None]:
    """Returns a copy of the function, or of the module with the same tensors, with a code object of its own; and that code object.

    The code object is None if `function` has no Python code object: then `function` itself is returned.
    """
    if isinstance(function, nn.Module):
        return _twin_of_module(function)
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        fresh = _fresh(function.__func__)
        return MethodType(fresh, function.__self__), fresh.__code__
    if isinstance(function, FunctionType):
        fresh = _fresh(function)
        return fresh, fresh.__code__
    return function, None


def _twin_of_module(module: nn.Module) -> tuple[Callable[..., Any], CodeType | None]:
    """Returns the twin of a module, whose hooks run outside of the traced frame of `forward`, as under ``torch.compile(module)``.

    Dynamo traces no frame of torch's own modules.  For these, as in ``torch.compile``, a function that calls the module is traced.
    """
    forward = module.forward
    if not isinstance(forward, MethodType) or not isinstance(forward.__func__, FunctionType):
        return module, None
    if trace_rules_check(forward):
        return _twin(wrap_inline(module))  # torch's own function: no line of compile_remat is in a node's stack trace
    twin, fresh = object.__new__(type(module)), _fresh(forward.__func__)
    twin.__dict__.update(module.__dict__)  # parameters, buffers, submodules and hooks are the module's own
    twin.__dict__["forward"] = MethodType(fresh, twin)
    return twin, fresh.__code__


def _fresh(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy
