"""Runs the code that Inductor emits without its kernels, and notes each access of each kernel; see `clocks`.

The code runs as Python runs it: its variables, the tensors that autograd saves and the tickets of copies live and die as in a real
step, and memory is freed when the last of them dies.  A kernel of Inductor's reads or writes an argument as the name of its
parameter says (``in_ptr0``, ``out_ptr0``, ``in_out_ptr0``), and any other operator as its schema says; what neither names counts
as read and written.  Offload's operators run the product's own functions on `WatchedStreams`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import async_compile, compile_fx, cpu_vec_isa
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from compile_remat._torch.offload import offload_ops
from compile_remat._torch.offload.streams import streams_replaced
from compile_remat.inductor.cpp_kernels.building import KernelsOfGraph
from compile_remat.inductor.observe import Emitted
from compile_remat.inductor.wrapper_names import constants_of
from tests.races.clocks import Event
from tests.races.watched import Watch, WatchedStreams

OPERATORS = {
    offload_ops.STASH: "stash",
    offload_ops.RELEASE: "release",
    offload_ops.FETCH: "fetch",
    offload_ops.ARRIVE: "arrive",
    offload_ops.ARRIVED: "arrived",
}
NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
CPP_SIGNATURE = re.compile(r'extern "C"\s+void\s+\w+\((?P<parameters>[^)]*)\)')
TRITON_SIGNATURE = re.compile(r"^def \w+\((?P<parameters>[^)]*)\):", re.MULTILINE)
MUTATED = re.compile(r"'mutated_arg_names': \[(?P<names>[^\]]*)\]")


class Kernel:
    """A kernel of Inductor's own: called, it notes its accesses.

    Attributes:
        name: The kernel's name in the code that calls it.
        only_read: For each parameter, whether the kernel reads it and does not write it.
    """

    def __init__(self, watch: Watch, only_read: Sequence[bool]) -> None:
        self.watch, self.name, self.only_read = watch, "kernel", tuple(only_read)

    @staticmethod
    def cpp(watch: Watch, source: str) -> Kernel:
        """A kernel in C++: an input is a pointer to what is constant."""
        found = CPP_SIGNATURE.search(source)
        parameters = found["parameters"].split(",") if found else []
        return Kernel(watch, ["const" in p and bool(re.search(r"\bin_ptr\d+$", p.strip())) for p in parameters])

    @staticmethod
    def triton(watch: Watch, source: str) -> Kernel:
        """A kernel in Triton, which lists the parameters that it writes into."""
        found, mutated = TRITON_SIGNATURE.search(source), MUTATED.search(source)
        parameters = [p.split(":")[0].strip() for p in found["parameters"].split(",")] if found else []
        written = re.findall(r"\w+", mutated["names"]) if mutated else parameters
        return Kernel(watch, [bool(re.fullmatch(r"in_ptr\d+", p)) and p not in written for p in parameters])

    def __call__(self, *arguments: object) -> None:
        self.watch.ran(self.name)
        for place, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                is_read = place < len(self.only_read) and self.only_read[place]
                self.watch.access(self.watch.stream, self.name, argument, writes=not is_read)

    def run(self, *arguments: object, **_: object) -> None:
        """As Triton kernels are called."""
        self(*arguments)


class Operators(TorchDispatchMode):
    """Notes the accesses of all other operators, whose results are uninitialised memory of the watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPERATORS:
            return self._offload(func, args)
        returned = [each.alias_info for each in func._schema.returns]
        if func in NUMBERS or any(alias is not None and not alias.is_write for alias in returned):
            return func(*args, **kwargs)  # a view
        if not _tensors((args, kwargs)) and kwargs.get("dtype") is torch.int64 and args and args[0] == []:
            return func(*args, **kwargs)  # a ticket
        if not self.watch.asking:
            self.watch.ran(str(func))
        for value, is_written in _arguments(func, args, kwargs):
            self.watch.access(self.watch.stream, str(func), value, writes=is_written)
        return self._results(func, args, kwargs)

    def _offload(self, func: Any, args: Any) -> Any:
        name = OPERATORS[func]
        self.watch.ran(name)
        kept, self.watch.asking = self.watch.asking, name
        try:
            with self:
                return getattr(offload_ops, f"_{name}")(*args)
        finally:
            self.watch.asking = kept

    def _results(self, func: Any, args: Any, kwargs: Any) -> Any:
        """New memory for each result that is not one of the arguments."""
        given = _tensors((args, kwargs))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = {id(value): mode.from_tensor(value, static_shapes=True) for value in given}
            result = func(
                *tree_map_only(torch.Tensor, lambda x: fakes[id(x)], args),
                **tree_map_only(torch.Tensor, lambda x: fakes[id(x)], kwargs),
            )
        same = {id(fakes[id(value)]): value for value in given}
        over = {fakes[id(value)].untyped_storage()._cdata: value for value in given}

        def made(fake: torch.Tensor) -> torch.Tensor:
            if id(fake) in same:
                return same[id(fake)]
            owner = over.get(fake.untyped_storage()._cdata)
            if owner is not None:
                return owner.as_strided(fake.size(), fake.stride(), fake.storage_offset())
            value = empty_strided(self.watch, fake.size(), fake.stride(), fake.dtype)
            self.watch.access(self.watch.stream, str(func), value, writes=True)
            return value

        return tree_map_only(torch.Tensor, made, result)


def empty_strided(watch: Watch, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the watch, as ``torch.empty_strided``."""
    elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
    return watch.empty(elements, dtype).as_strided(size, stride)


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yields each tensor of a call, with whether the schema says that the operator writes it."""
    named = {each.name: each for each in func._schema.arguments}
    pairs = [
        *zip(func._schema.arguments, args, strict=False),
        *((named[name], value) for name, value in kwargs.items()),
    ]
    for parameter, value in pairs:
        is_written = parameter.alias_info is not None and parameter.alias_info.is_write
        for tensor in _tensors(tree_flatten(value)[0]):
            yield tensor, is_written


class Code:
    """The code of one graph, as a compiled graph that only notes what it does."""

    def __init__(self, watch: Watch, source_code: str) -> None:
        self.watch = watch
        self._boxed_call = True  # torch hands over a list, and looks for this in the object's dictionary
        self.take(source_code)

    def take(self, source_code: str) -> None:
        """Run another code from now on."""
        self.source_code, watch = source_code, self.watch
        scope: dict[str, Any] = {}
        with kernels_watched(watch):
            exec(compile(source_code, "emitted", "exec"), scope)
        for name, value in scope.items():
            if isinstance(value, Kernel):
                value.name = name
        for device in ("cpu", "cuda"):
            scope[f"empty_strided_{device}"] = lambda *given: empty_strided(watch, *given)
        scope |= {"assert_size_stride": _nothing, "assert_alignment": _nothing, **constants_of(source_code)}
        self.function = scope["call"]

    def __call__(self, inputs: list[Any]) -> Any:
        """Run on a list that the code empties."""
        with torch.no_grad(), Operators(self.watch):
            return self.function(inputs)


def trace_of_code(forward: Emitted, backward: Emitted, returned: Sequence[str]) -> list[Event]:
    """The events of a step by the code of its graphs, in memory of the CPU.

    Args:
        returned: Names of the values that the forward returns.
    """
    watch = Watch()

    def made(value: object) -> object:
        is_tensor = isinstance(value, torch.Tensor)
        return empty_strided(watch, value.size(), value.stride(), value.dtype) if is_tensor else value

    with watching(watch):
        given = Code(watch, forward.source_code)([made(value) for value in forward.inputs])
        handed = dict(zip(returned, given, strict=True))
        del given
        inputs = [
            handed.pop(name) if name in handed else made(value)
            for name, value in zip(backward.names, backward.inputs, strict=True)
        ]
        del handed
        Code(watch, backward.source_code)(inputs)
    return watch.trace


@contextmanager
def kernels_watched(watch: Watch) -> Iterator[None]:
    """Inside, Inductor builds no kernel."""
    with ExitStack() as stack:
        for compiler in (async_compile.AsyncCompile, KernelsOfGraph):
            stack.enter_context(
                mock.patch.object(compiler, "cpp_pybinding", lambda _, types, source: Kernel.cpp(watch, source))
            )
        triton = lambda _, name, source, **keywords: Kernel.triton(watch, source)  # noqa: E731
        stack.enter_context(mock.patch.object(async_compile.AsyncCompile, "triton", triton))
        yield


@contextmanager
def watched(watch: Watch) -> Iterator[list[Code]]:
    """Inside, what is compiled only notes what it does, also later; collects the code of each graph."""
    codes: list[Code] = []
    inner = compile_fx.compile_fx_inner

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Code:
        codes.append(Code(watch, inner(gm, inputs, **keywords).source_code))
        return codes[-1]

    with (
        watching(watch),
        kernels_watched(watch),
        mock.patch.object(compile_fx, "compile_fx_inner", compile_graph),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(force_disable_caches=True),
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", list),  # Inductor builds six programs to find them
    ):
        yield codes


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Inside, offload asks the watch for streams."""
    streams = WatchedStreams(watch)
    with streams_replaced("cpu", streams), streams_replaced("cuda", streams):
        yield


def _nothing(*_: object) -> None:
    return None
