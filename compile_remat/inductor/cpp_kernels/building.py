"""Builds the C++ kernels of a graph together, although they are called one by one, and each kernel once.

The headers of one file alone cost the compiler most of a second, and a budget doubles the number of kernels.  The code
that Inductor emits makes each kernel by ``async_compile.cpp_pybinding(types, source)``, and ends with
``async_compile.wait(globals())``.  Two lines in the header of a graph's code (`HEADER`) make ``async_compile`` a `KernelsOfGraph`,
which collects the kernels until ``wait``.  A file in torch's cache, named by the kernel, says which library has the kernel, so
that other graphs and processes find it.  Triton kernels, and C++ kernels that cannot share a file, go to Inductor's own compilers
as usual.

Private names of ``torch._inductor``, 2.11 to 2.15: ``async_compile.AsyncCompile`` and ``get_compile_threads``,
``exc.CppCompileError``, ``codecache.code_hash``, ``get_path`` and ``cache_dir``, ``cpp_builder.CppBuilder``
and ``CppTorchDeviceOptions``, and ``cpu_vec_isa.pick_vec_isa``.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_remat._torch.version import private_module, private_name
from compile_remat._util.atomic_write import write_atomically
from compile_remat.inductor.cpp_kernels.unit import Function, Kernel, Unit, function_of, start_building

if TYPE_CHECKING:
    from torch._inductor.async_compile import AsyncCompile
else:
    AsyncCompile = private_name("torch._inductor.async_compile", "AsyncCompile")
get_compile_threads = private_name("torch._inductor.async_compile", "get_compile_threads")
CppCompileError = private_name("torch._inductor.exc", "CppCompileError")
codecache = private_module("torch._inductor.codecache")
cpp_builder = private_module("torch._inductor.cpp_builder")
pick_vec_isa = private_name("torch._inductor.cpu_vec_isa", "pick_vec_isa")

LOG = logging.getLogger("compile_remat")

HEADER = (
    "from compile_remat.inductor.cpp_kernels.building import KernelsOfGraph",
    "async_compile = KernelsOfGraph()",
)
"""Lines that `build_together` appends to the header of a graph's code."""

UNIT_CHARACTERS = 48 << 10
"""Source characters in one unit if several processors compile; the headers then cost a fifth of the compiler's time."""

MOST_CHARACTERS = 192 << 10
"""Most source characters in one unit: the compiler holds the whole unit in memory."""


class KernelsOfGraph(AsyncCompile):
    """The object ``async_compile`` in the code of one graph."""

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        """Returns a C++ kernel that `wait` replaces by its function, or the function if the kernel can share no file."""
        kernel = Kernel(tuple(argtypes), source_code)
        return kernel if kernel.can_share else super().cpp_pybinding(argtypes, source_code)

    def wait(self, scope: dict[str, Any]) -> None:
        """Called at the end of the code: replace the kernels among its global names by their functions.

        Raises:
            CppCompileError: The compiler refuses a kernel.
        """
        super().wait(scope)
        kernels = {name: value for name, value in scope.items() if isinstance(value, Kernel)}
        functions = functions_of(kernels.values())
        scope.update({name: functions[kernel] for name, kernel in kernels.items()})


def build_together(wrapper: Any) -> None:
    """Write `HEADER` into a graph's wrapper, so that a `KernelsOfGraph` makes its kernels; call before any kernel is made."""
    known = wrapper.header.getvalue()
    for line in HEADER:
        if line not in known:
            wrapper.header.writeline(line)


_building = threading.RLock()
_functions: dict[str, Function] = {}


def functions_of(kernels: Iterable[Kernel]) -> dict[Kernel, Function]:
    """The functions of kernels: of this process, of libraries that were built earlier, or of new libraries."""
    keys = _keys(list(dict.fromkeys(kernels)))
    with _building:
        missing = {}
        for kernel, key in keys.items():
            function = _functions.get(key) or _function_in_cache(key)
            if function is None:
                missing[kernel] = key
            else:
                _functions[key] = function
        _build_missing(missing)
        return {kernel: _functions[key] for kernel, key in keys.items()}


def forget_functions() -> None:
    """Forget the functions of this process: as in a new process, kernels are looked up in torch's cache again."""
    _functions.clear()
    Unit.cache_clear()


def _build_missing(keys: dict[Kernel, str]) -> None:
    units = _units(list(keys))
    submit = AsyncCompile.submit if get_compile_threads() > 1 else None
    started = [start_building(unit, submit) for unit in units]
    for unit, library in zip(units, started, strict=True):
        try:
            found = library()
        except CppCompileError:
            if len(unit) == 1:
                raise
            LOG.info("%d kernels cannot be built together; they are built one by one", len(unit), exc_info=True)
            for kernel in unit:
                _take([keys[kernel]], start_building([kernel], submit)())
        else:
            _take([keys[kernel] for kernel in unit], found)


def _take(keys: Sequence[str], library: tuple[str, str]) -> None:
    """Load the kernels of a new library, and note their places in torch's cache."""
    for number, key in enumerate(keys):
        _functions[key] = function_of(*library, number)
        _note(key, *library, number)


def _units(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Groups of kernels of similar length: at most one per compile thread, more if a group would exceed `MOST_CHARACTERS`."""
    length = sum(len(kernel.source) for kernel in kernels)
    number = max(min(get_compile_threads(), -(-length // UNIT_CHARACTERS)), -(-length // MOST_CHARACTERS))
    units: list[list[Kernel]] = [[] for _ in range(number)]
    lengths = [0] * number
    for kernel in sorted(kernels, key=lambda kernel: -len(kernel.source)):
        shortest = lengths.index(min(lengths))
        units[shortest].append(kernel)
        lengths[shortest] += len(kernel.source)
    return units


# -- places of built kernels --------------------------------------------------------------------------------------------


def _keys(kernels: Sequence[Kernel]) -> dict[Kernel, str]:
    """Key of each built kernel: a hash of its code and of the compiler's command line."""
    if not kernels:
        return {}
    flags = {**Unit.cpp_compile_command_flags, "device_type": "cpu", "vec_isa": pick_vec_isa()}
    options = cpp_builder.CppTorchDeviceOptions(**flags)
    command = cpp_builder.CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    return {kernel: codecache.code_hash(f"{kernel.arg_types}\n{kernel.source}", command) for kernel in kernels}


def _place_of(key: str) -> Path:
    return Path(codecache.get_path(key, "remat_kernel")[2])


def _note(key: str, library_key: str, path: str, number: int) -> None:
    inside = os.path.relpath(path, codecache.cache_dir())
    try:
        write_atomically(_place_of(key), json.dumps([library_key, inside, number]))
    except OSError as error:
        LOG.info("a built kernel cannot be stored, and the next process builds it again: %s", error)


def _function_in_cache(key: str) -> Function | None:
    """The function of a kernel that was built earlier; None if there is none, or if it cannot be loaded."""
    try:
        library_key, inside, number = json.loads(_place_of(key).read_text(encoding="utf-8"))
        return function_of(library_key, os.path.join(codecache.cache_dir(), inside), number)
    except FileNotFoundError:
        return None
    except (OSError, ImportError, ValueError, TypeError) as error:
        LOG.info("a stored kernel cannot be loaded and is built again: %s", error)
        return None
