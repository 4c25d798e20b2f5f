"""Puts several C++ kernels into one file for the compiler (a unit), which becomes one library.

Each kernel stands in a namespace as Inductor emitted it, with Inductor's Python bindings and a Python module of its own: a library
may hold many modules, each found by its function ``PyInit_``.  The compiler's options are Inductor's.

Private names of ``torch._inductor.codecache``, 2.11 to 2.15: ``CppPythonBindingsCodeCache`` with ``suffix_template``,
``call_entry_function``, ``load_async`` and ``_load_library``; `Unit` and `function_of` use them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from compile_remat._torch.version import private_name

if TYPE_CHECKING:
    from torch._inductor.codecache import CppPythonBindingsCodeCache
else:
    CppPythonBindingsCodeCache = private_name("torch._inductor.codecache", "CppPythonBindingsCodeCache")

Function = Callable[..., None]
ENTRY = re.compile(r'(extern "C"[^(]*\b)kernel\(')
OF_THE_FILE = ("#include", "#define PY_SSIZE_T_CLEAN")
"""Prefixes of the lines that stand at the top of the file, before all namespaces."""


@dataclass(frozen=True)
class Kernel:
    """One kernel as Inductor emits it.

    Attributes:
        arg_types: C++ types of the arguments.
        source: C++ text: headers, and a function ``kernel``.
    """

    arg_types: tuple[str, ...]
    source: str

    @property
    def can_share(self) -> bool:
        """True if the kernel may share a file with others: it has one function with C linkage and no macros."""
        return len(ENTRY.findall(self.source)) == self.source.count('extern "C"') == 1 and "#define" not in self.source


class Unit(CppPythonBindingsCodeCache):
    """Inductor's compiler of C++ libraries, which here returns a library's path and loads no module of it."""

    cache: dict[str, Any] = {}  # noqa: RUF012 - as torch declares it

    @staticmethod
    def cache_clear() -> None:
        """Forget the libraries that this process knows."""
        Unit.cache.clear()

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> ModuleType:
        library = ModuleType(key)
        library.path = path  # type: ignore[attr-defined]
        return library


def start_building(kernels: Sequence[Kernel], submit: Callable[..., Any] | None) -> Callable[[], tuple[str, str]]:
    """Start to build a library of kernels; the returned function waits for it, and returns the library's key and path.

    Args:
        submit: Runs a function elsewhere, and returns its future; if None, the library is built when it is waited for.
    """
    wait = Unit.load_async(unit_source(kernels), "cpu", submit_fn=submit)

    def library() -> tuple[str, str]:
        found = wait()
        return found.key, found.path

    return library


def unit_source(kernels: Sequence[Kernel]) -> str:
    """The C++ text of one file with the kernels and their Python bindings."""
    top: dict[str, None] = {}
    parts = []
    for number, kernel in enumerate(kernels):
        lines = (_renamed(kernel.source, number) + _bindings(kernel, number)).splitlines()
        top |= dict.fromkeys(line.strip() for line in lines if line.strip().startswith(OF_THE_FILE))
        own = [line for line in lines if not line.strip().startswith(OF_THE_FILE)]
        parts.append("\n".join([f"namespace unit_{number} {{", *own, "}", ""]))
    return "\n".join([*top, "", *parts])


def function_of(key: str, path: str, number: int) -> Function:
    """Load a kernel of a library, by its position in the unit.

    Raises:
        ImportError, OSError: The library is damaged.
    """
    entry = entry_of(number)
    loader: Any = type(entry, (CppPythonBindingsCodeCache,), {"entry_function": entry})
    function: Function = getattr(loader._load_library(path, key), entry)
    return function


def entry_of(number: int) -> str:
    """The name of a kernel by its position in the unit, and of its Python module."""
    return f"kernel_{number}"


def _renamed(source: str, number: int) -> str:
    return ENTRY.sub(rf"\g<1>{entry_of(number)}(", source)


def _bindings(kernel: Kernel, number: int) -> str:
    """The Python bindings that Inductor's ``load_pybinding_async`` appends to a kernel."""
    types = [kind.replace("const ", "") for kind in kernel.arg_types]
    arguments = ", ".join(f"parse_arg<{kind}>(args, {position})" for position, kind in enumerate(types))
    call = Unit.call_entry_function.replace("kernel", entry_of(number)).format(arguments)
    bindings: str = Unit.suffix_template.format(
        arg_len=len(types), call_entry_func=call, entry_func=entry_of(number), extra_parse_arg=""
    )
    return bindings
