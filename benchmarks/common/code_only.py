"""Inductor's code for the CPU without a C++ compiler: for what asks about code and peaks, not about numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import async_compile
from torch._inductor import config as inductor_config

from compile_remat.inductor.cpp_kernels.building import KernelsOfGraph


def _refuse(*args: object) -> None:
    raise AssertionError("this kernel was not compiled")


@contextmanager
def kernels_replaced_by(function: Callable[..., None]) -> Iterator[None]:
    """Inductor generates all code and calls `function` wherever it would call a C++ kernel; no C++ is compiled."""
    compilers = (async_compile.AsyncCompile, KernelsOfGraph)
    with ExitStack() as stack:
        for compiler in compilers:
            stack.enter_context(mock.patch.object(compiler, "cpp_pybinding", lambda *args, **kwargs: function))
        yield


@contextmanager
def without_compiler() -> Iterator[None]:
    """Graphs are lowered and their code is emitted, nothing is built and nothing cached; what is compiled here cannot run."""
    with (
        kernels_replaced_by(_refuse),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(force_disable_caches=True),
    ):
        yield


@contextmanager
def peaks_of_rounds() -> Iterator[list[tuple[int | None, int | None]]]:
    """Collects, for each time that a graph is planned and compiled inside, its predicted peak and that of its code, in bytes."""
    from compile_remat.compilation import driver

    found: list[tuple[int | None, int | None]] = []
    see = driver.with_scheduled_peak

    def seen(reports: Any, emissions: Any) -> Any:
        result = see(reports, emissions)
        found.extend((report.predicted_peak_bytes, report.scheduled_peak_bytes) for report in result)
        return result

    with mock.patch.object(driver, "with_scheduled_peak", seen):
        yield found


def compile_code(module: Callable[..., Any], inputs: Sequence[Any], memory_budget: object) -> None:
    """Emit the code of a training step under our backend, which reports it; inside of `without_compiler`.

    Raises:
        RematError: No plan fits, or a setting is off.
    """
    from compile_remat.backend import compile_graph
    from compile_remat.config import RematConfig
    from compile_remat.errors import RematError

    config, errors = RematConfig.resolve({"memory_budget": memory_budget}), list[RematError]()

    def backend(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            compile_graph(graph, graph_inputs, config, {})
        except RematError as error:  # raised in here, Dynamo would wrap it
            errors.append(error)
        return graph.forward

    torch.compile(module, backend=backend)(*inputs)
    if errors:
        raise errors[0]


def plain_peak_bytes(module: Callable[..., Any], inputs: Sequence[Any]) -> int | None:
    """The codegen peak under plain Inductor; None where it is not known; inside of `without_compiler`."""
    from compile_remat.compilation.feedback import Emissions
    from compile_remat.inductor.entry import compile_with_partitioner

    emissions = Emissions()

    def backend(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
        choose = min_cut_rematerialization_partition
        compile_with_partitioner(graph, graph_inputs, choose, {}, guarded=False, observer=emissions)
        return graph.forward

    torch.compile(module, backend=backend)(*inputs)
    run = emissions.region_run()
    return None if run is None else run.peak_bytes
