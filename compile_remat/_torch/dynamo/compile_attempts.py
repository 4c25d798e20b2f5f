"""Reports about the frames that Dynamo compiles and the frames that it gives up, under any backend.

Dynamo has callbacks for the end of an attempt and hooks for the bytecode that it makes.  Neither names the frame, so the frame of
``convert_frame._compile`` is looked up on the stack.  ``torch._dynamo.reset`` drops the callbacks, and not the hooks.

Private names of torch, read in 2.13: ``torch._dynamo.callback.callback_handler``, ``convert_frame.register_bytecode_hook`` and the
local variables of ``convert_frame._compile``; ``_torchdynamo_orig_backend`` of wrappers of a backend, ``dynamo_ctx`` and
``_compiled_call_impl`` of modules, ``compiler_fn`` of ``torch._TorchCompileWrapper``.  A name that a version lacks is skipped
without an error: this module serves warnings alone, and must make no compilation fail.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo import callback, convert_frame
from torch.nn.parameter import is_lazy

LOG = logging.getLogger("compile_remat")

WRAPPERS = 8
"""More wrappers than torch puts around a backend."""


@dataclass(frozen=True)
class Attempt:
    """One frame that Dynamo has compiled or given up.

    Attributes:
        backend: The backend function that `torch.compile` was given, or that the given name stands for.
        code: The code object of the frame.
        values: Objects that the frame refers to: its arguments, its closure, and the globals that its code names.
        is_given_up: True if Dynamo gave up, so that the frame runs uncompiled.
        problem: The first line of the error that made Dynamo give up.
    """

    backend: object
    code: CodeType
    values: tuple[object, ...]
    is_given_up: bool = False
    problem: str = ""


class Attempts:
    """Calls `seen` at the end of each attempt of Dynamo, in any thread, until `stop`."""

    def __init__(self, seen: Callable[[Attempt], None]) -> None:
        self._seen: Callable[[Attempt], None] | None = seen
        register = getattr(convert_frame, "register_bytecode_hook", None)
        self._handle = None if register is None else register(self._bytecode)
        self.listen()

    def listen(self) -> None:
        """Register the callback, again if a reset of Dynamo has dropped it."""
        handler = getattr(callback, "callback_handler", None)
        if self._seen is not None and self._ended not in getattr(handler, "end_callbacks", [self._ended]):
            callback.callback_handler.register_end_callback(self._ended)

    def stop(self) -> None:
        """Report no further attempts.  The callback stays registered, since Dynamo may be iterating over its callbacks."""
        self._seen = None
        if self._handle is not None:
            self._handle.remove()

    def _bytecode(self, code: CodeType, out_code: CodeType) -> None:
        self.listen()
        self._ended()

    def _ended(self, arguments: object = None) -> None:
        try:
            attempt = None if self._seen is None else _attempt()
            if self._seen is not None and attempt is not None:
                self._seen(attempt)
        except Exception:  # no error of ours may reach Dynamo
            LOG.debug("what Dynamo has compiled cannot be told", exc_info=True)


def _attempt() -> Attempt | None:
    frame = _frame_of("_compile", "torch._dynamo.convert_frame")
    given = {} if frame is None else frame.f_locals
    code, arguments, variables = (given.get(name) for name in ("code", "locals", "globals"))
    if not isinstance(code, CodeType) or not isinstance(arguments, dict) or not isinstance(variables, dict):
        return None
    cells = [_content(cell) for cell in given.get("closure") or ()]
    named = [variables[name] for name in code.co_names if name in variables]
    error = sys.exc_info()[1]
    problem = "" if error is None else str(error).strip().partition("\n")[0]
    backend, values = backend_of(given.get("compiler_fn")), (*arguments.values(), *cells, *named)
    return Attempt(backend, code, values, error is not None, problem)


def model_being_compiled() -> object:
    """Returns the model or function given to the ``torch.compile`` call that is on the stack; None if there is no such call."""
    frame = _frame_of("compile", "torch")
    return None if frame is None else frame.f_locals.get("model")


def _frame_of(function: str, module: str) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return frame
        frame = frame.f_back
    return None


def backend_of(value: object) -> object:
    """Returns the function behind a backend, without torch's wrappers."""
    for _ in range(WRAPPERS):
        value = getattr(value, "_torchdynamo_orig_backend", value)
    return getattr(value, "compiler_fn", value)


def is_compiled_by(value: object, backend: object) -> bool:
    """Returns whether a function, a module, or a submodule of it was compiled by `torch.compile` with this backend."""
    if not isinstance(value, nn.Module):
        return any(found is backend for found in _backends_of(value))
    for module in value.modules():
        context = vars(module).get("dynamo_ctx")
        if backend_of(getattr(context, "callback", None)) is backend:
            return True
        if any(found is backend for found in _backends_of(vars(module).get("_compiled_call_impl"))):
            return True
    return False


def _backends_of(function: object) -> list[object]:
    """Returns the backends in the closure of a compiled function, where Dynamo's context is; empty if it is not compiled."""
    if not inspect.isfunction(function) or "_torchdynamo_orig_callable" not in vars(function):
        return []
    contexts = [_content(cell) for cell in function.__closure__ or ()]
    return [backend_of(getattr(context, "callback", context)) for context in contexts]


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def trained_leaves(value: object) -> Iterator[torch.Tensor]:
    """Yields the leaves that need gradients: of a module, of a method's owner, of a function's closure, or a tensor itself."""
    if inspect.ismethod(value) or inspect.isfunction(value):
        value = getattr(value, "_torchdynamo_orig_callable", value)
    owners: list[object] = [getattr(value, "__self__", value)]
    if inspect.isfunction(value):
        owners = [_content(cell) for cell in value.__closure__ or ()]
    for owner in owners:
        for tensor in owner.parameters() if isinstance(owner, nn.Module) else [owner]:
            if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and tensor.is_leaf and tensor.requires_grad:
                yield tensor


def has_gradients(values: list[object]) -> bool:
    """Returns whether one of these objects is a leaf tensor with a `.grad`."""
    tensors = (v for v in values if issubclass(type(v), torch.Tensor))
    return any(t.is_leaf and t.grad is not None for t in tensors if isinstance(t, torch.Tensor))
