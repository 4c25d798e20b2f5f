"""Calls Inductor's compiler.  Private names of ``torch._inductor`` and ``torch._functorch``, same in 2.11, 2.13 and 2.15.

`compile_with_partitioner` hands a partitioner to ``compile_fx`` through Inductor's own option for it, and compiles each graph
by an ``inner_compile`` of its own: nothing of torch is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import compile as compile_with_inductor
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config

from compile_remat._torch.delivery import inductor_lowering as delivery_lowering
from compile_remat._torch.offload import inductor_lowering as offload_lowering
from compile_remat.inductor.draw_order import DrawsInTurn
from compile_remat.inductor.early_backward import PartitionRecorder, with_early_backward
from compile_remat.inductor.install import PARTITIONER_OPTION
from compile_remat.inductor.install import CustomPartitionerFn as CustomPartitionerFn
from compile_remat.inductor.observe import GraphRewrite, Observer, observed
from compile_remat.inductor.plan_guard import guarded as under_guard
from compile_remat.inductor.plan_guard import watched

NO_CACHES = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
"""Options that turn Inductor's cache of graphs off, and so AOTAutograd's, which needs it: every graph is lowered."""


def _as_it_is(graph: fx.GraphModule) -> fx.GraphModule:
    return graph


def compile_with_partitioner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: CustomPartitionerFn,
    options: Mapping[str, Any],
    *,
    guarded: bool,
    fuses_more: bool = False,
    observer: Observer | None = None,
    before_code: Observer | None = None,
    is_ordered: Callable[[fx.GraphModule], bool] = lambda graph: False,
    rewrite: GraphRewrite = _as_it_is,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor; `partitioner` chooses the saved tensors.

    The options are passed as ``config_patches``, which also apply to a backward that is compiled later, out of scope.

    Args:
        guarded: Keep Inductor's fusions to the plan.
        fuses_more: Then let fusions raise memory up to the peak of each graph; see `fusion_guard`.
        observer: Called with the code of each graph, also if the code comes from the graph cache; the backward is then compiled
            with the forward, symbolic sizes or not.  Not called for graphs that come from the partition cache.
        before_code: Called with each lowered graph before its code is made, the forward first; may raise.  Needs `observer`.
        is_ordered: Returns whether the operators of a graph that draw from a generator have to run in the graph's order.
        rewrite: Called with each graph that is compiled for inference, after Inductor's passes over joint graphs.
    """
    delivery_lowering.register()
    offload_lowering.register()
    compiler = inductor.compile_fx_inner
    if guarded:
        compiler = under_guard(compiler, fuses_more=fuses_more)
    if observer is not None:
        partitioner = recorder = PartitionRecorder(partitioner)
        compiler = with_early_backward(observed(watched(compiler), observer, before_code), recorder)
    final = compiler

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        in_turn = (
            {"_pre_fusion_custom_pass": DrawsInTurn.behind(inductor_config._pre_fusion_custom_pass)}
            if is_ordered(graph)
            else {}
        )
        with inductor_config.patch(in_turn):
            return final(rewrite(graph) if kwargs.get("is_inference") else graph, inputs, **kwargs)

    patches = {**options, PARTITIONER_OPTION: partitioner}
    return _callable(inductor.compile_fx(gm, list(example_inputs), inner_compile=compile_graph, config_patches=patches))


def compile_plain(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile with unchanged Inductor by its documented function, which also works in an unknown version of torch."""
    return _callable(compile_with_inductor(gm, list(example_inputs), options=dict(options)))


def _callable(compiled: Any) -> Callable[..., Any]:
    """Gives a type to the result of ``compile_fx``, which is callable for a graph module; its type also covers AOT packages."""
    function: Callable[..., Any] = compiled
    return function


def compile_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: CustomPartitionerFn,
    rewrite: GraphRewrite = _as_it_is,
) -> Callable[..., Any]:
    """Run the two FX graphs as they are, with Inductor's decompositions but without its passes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=lambda graph, inputs: boxed_nop(rewrite(graph), inputs),
        partition_fn=partitioner,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    with _tracing_context(example_inputs):
        compiled: Callable[..., Any] = backend(gm, list(example_inputs))
    return compiled


@contextmanager
def _tracing_context(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Enters a tracing context if there is none, as ``compile_fx`` does: without one, FX keeps random nodes that have no reader."""
    mode = detect_fake_mode(list(example_inputs))
    if TracingContext.try_get() is not None or mode is None:
        yield
    else:
        with tracing(TracingContext(mode)):
            yield


@contextmanager
def without_partition_cache() -> Iterator[None]:
    """Turns AOTAutograd's cache off inside, as no partitioner runs on a hit.  Compiled kernels are still found."""
    with functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        yield


@contextmanager
def without_caches() -> Iterator[None]:
    """Turns torch's caches of partitions and graphs off inside: graphs are partitioned and lowered anew, and nothing is stored."""
    with without_partition_cache(), inductor_config.patch(NO_CACHES):
        yield
