"""Inductor's code for the CPU without a C++ compiler: for benchmarks and tests of code and peaks, not of numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import async_compile, cpu_vec_isa
from torch._inductor import config as inductor_config

from compile_remat.compilation.region_run import run_region
from compile_remat.inductor.cpp_kernels.building import KernelsOfGraph
from compile_remat.inductor.unplanned_graphs import computes_gradients


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
    """Inside, graphs are lowered and their code is emitted, but no kernel is built and nothing is cached; the code cannot run.

    The CPU's vector instruction sets are detected first: without caches Inductor builds six programs in each process to find them.
    """
    cpu_vec_isa.valid_vec_isa_list()
    with (
        kernels_replaced_by(_refuse),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(force_disable_caches=True),
    ):
        yield


@contextmanager
def peaks_of_rounds() -> Iterator[list[tuple[int | None, int | None]]]:
    """Collects, for each time that a graph is planned and compiled inside, the predicted peak and the code's peak, in bytes."""
    from compile_remat.compilation import driver

    found: list[tuple[int | None, int | None]] = []
    see = driver.with_scheduled_peak

    def seen(reports: Any, emissions: Any) -> Any:
        result = see(reports, emissions)
        found.extend((report.predicted_peak_bytes, report.scheduled_peak_bytes) for report in result)
        return result

    with mock.patch.object(driver, "with_scheduled_peak", seen):
        yield found


class GraphCode:
    """One Dynamo graph under our backend: its code of all rounds, and its reports.

    Attributes:
        region: The graph's number in reports.
        reports: Reports of the compilation that was kept; empty if the compilation was refused.
    """

    def __init__(self, graph: fx.GraphModule, region: int) -> None:
        self.graph, self.region, self._has_gradients = graph, region, computes_gradients(graph)
        self.reports: list[Any] = []
        self._rounds: list[Any] = []

    def new_round(self) -> Any:
        """Returns a new `Emissions`, which collects the code of one more compilation."""
        from compile_remat.compilation.feedback import Emissions

        self._rounds.append(Emissions())
        return self._rounds[-1]

    @property
    def rounds(self) -> int:
        """The number of compilations that emitted code for the graph."""
        return sum(bool(each.seen) for each in self._rounds)

    @property
    def trains(self) -> bool:
        """True if the last code has a backward, in a graph of its own or inside of the forward's graph."""
        return self._has_gradients or bool(self._rounds and _has_backward(self._rounds[-1]))

    @property
    def emitted_bytes(self) -> int | None:
        """Peak memory of the graph's last emitted code, by a dry run; None if unknown."""
        run = self._rounds[-1].region_run() if self._rounds else None
        return None if run is None else run.peak_bytes

    @property
    def problem(self) -> str:
        """The reason why `emitted_bytes` is None; empty if the peak is known."""
        if self.emitted_bytes is not None:
            return ""
        seen = self._rounds[-1].seen if self._rounds else []
        forwards, backwards = ([each for each in seen if each.is_backward is side] for side in (False, True))
        if len(forwards) != 1 or len(backwards) != 1:
            return f"code of {len(forwards)} forwards and {len(backwards)} backwards"
        try:
            run_region(forwards[0], backwards[0])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("the dry run failed before")


def _has_backward(emissions: Any) -> bool:
    return any(each.is_backward for each in emissions.seen)


@contextmanager
def code_of_graphs() -> Iterator[list[GraphCode]]:
    """Collects, for each graph that our backend compiles inside, its code of all rounds and its reports, under `max` too."""
    from compile_remat.compilation import driver

    found: list[GraphCode] = []
    running: list[GraphCode] = []
    run, enter = driver.Compilation.run, driver.compile_with_partitioner

    def graph_of(compilation: driver.Compilation) -> GraphCode:
        """The same where its planner failed before, or where a plan for a shared budget takes the place of another one."""
        for graph in found:
            if graph.graph is compilation.gm or graph.region == compilation.region:
                return graph
        found.append(GraphCode(compilation.gm, compilation.region))
        return found[-1]

    def seen_run(self: driver.Compilation, *arguments: Any, **keywords: Any) -> Any:
        running.append(graph_of(self))
        try:
            compiled, running[-1].reports = run(self, *arguments, **keywords)
            return compiled, running[-1].reports
        finally:
            running.pop()

    def seen_round(gm: fx.GraphModule, *arguments: Any, observer: Any = None, **keywords: Any) -> Any:
        emissions = running[-1].new_round()

        def both(emitted: Any) -> None:
            emissions(emitted)
            if observer is not None:
                observer(emitted)

        return enter(gm, *arguments, observer=both, **keywords)

    with (
        mock.patch.object(driver.Compilation, "run", seen_run),
        mock.patch.object(driver, "compile_with_partitioner", seen_round),
    ):
        yield found


def compile_code(module: Callable[..., Any], inputs: Sequence[Any], memory_budget: object, **settings: object) -> None:
    """Emit the code of a training step under our backend, which reports it; inside of `without_compiler`.

    Raises:
        RematError: No plan fits, or a setting is off.
    """
    from compile_remat.backend import compile_graph
    from compile_remat.config import RematConfig
    from compile_remat.errors import RematError
    from compile_remat.runtime.refused_region import RefusedRegion

    config, errors = RematConfig.resolve({"memory_budget": memory_budget, **settings}), list[RematError]()

    def backend(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            made = compile_graph(graph, graph_inputs, config, {})
        except RematError as error:  # raised in here, Dynamo would wrap it
            errors.append(error)
        else:
            errors.extend([made.error] if isinstance(made, RefusedRegion) else [])  # which a call would raise
        return graph.forward

    torch.compile(module, backend=backend)(*inputs)
    if errors:
        raise errors[0]


def plain_peaks_bytes(module: Callable[..., Any], inputs: Sequence[Any]) -> list[int | None]:
    """The codegen peak under plain Inductor of each graph with a backward; None where one is not known.

    Inside of `without_compiler`.
    """
    from compile_remat.compilation.feedback import Emissions
    from compile_remat.inductor.entry import compile_with_partitioner

    found: list[int | None] = []

    def backend(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
        choose, emissions, has_gradients = min_cut_rematerialization_partition, Emissions(), computes_gradients(graph)
        compile_with_partitioner(graph, graph_inputs, choose, {}, guarded=False, observer=emissions)
        run = emissions.region_run()
        if has_gradients or _has_backward(emissions):
            found.append(None if run is None else run.peak_bytes)
        return graph.forward

    torch.compile(module, backend=backend)(*inputs)
    return found


def plain_peak_bytes(module: Callable[..., Any], inputs: Sequence[Any]) -> int | None:
    """The same of a module that is one graph; None where it is not known."""
    found = plain_peaks_bytes(module, inputs)
    return found[0] if len(found) == 1 else None
