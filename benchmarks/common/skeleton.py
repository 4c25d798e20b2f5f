"""The allocations of Inductor's code: all that its functions do, but for kernels of Inductor's own."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def skeleton(source_code: str) -> list[str]:
    """The statements of the functions that a wrapper defines, one after the other, without calls of its kernels.

    Two wrappers with the same skeleton allocate and free the same buffers in the same order, and call the same libraries between.
    """
    module = ast.parse(source_code)
    kernels = {name for statement in module.body for name in _kernel_of(statement)}
    functions = [
        node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name not in ("__init__",)
    ]
    return [line for function in functions for line in (function.name, *_lines(function.body, kernels))]


def _kernel_of(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith("async_compile."):
        yield from (target.id for target in statement.targets if isinstance(target, ast.Name))


def _lines(body: list[ast.stmt], kernels: set[str]) -> Iterator[str]:
    for statement in body:
        inner = [getattr(statement, name, []) for name in ("body", "orelse")]
        if any(inner):
            for part in inner:
                yield type(statement).__name__
                yield from _lines(part, kernels)
        elif not _is_of_kernels(statement, kernels):
            yield ast.unparse(statement)


def _is_of_kernels(statement: ast.stmt, kernels: set[str]) -> bool:
    """True if a statement calls a kernel, or gets the stream that the kernel runs in."""
    called = getattr(statement, "value", None)
    if not isinstance(called, ast.Call):
        return False
    names = {part.id for part in ast.walk(called.func) if isinstance(part, ast.Name)}
    return bool(names & (kernels | {"get_raw_stream"}))
