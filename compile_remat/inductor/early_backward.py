"""Compiles a backward together with its forward, so that its code can be observed before the first step.

torch compiles a backward at its first run (or at once, if sizes are saved for it).  Only then does torch know if the graph is
kept (``retain_graph=True``), in which case the backward must not overwrite saved activations, and only then does torch write
its cache entry.  This module compiles a copy of the backward as soon as the forward is compiled.  If torch later asks for the
same graph under the same conditions, torch gets that result; otherwise the graph is compiled again.

Nothing of torch is replaced.  ``functorch_config.force_non_lazy_backward_lowering`` does not help: torch takes the early backward
as final, so that torch refuses a first backward with ``retain_graph=True``.  A second compilation of the whole graph for
observation would help, at the cost of tracing and planning twice.

Private names, same in 2.11 to 2.15: ``compile_fx.compile_fx_backward``, ``TracingContext.fw_metadata``, ``.output_strides`` and
``.aot_graph_name``.  The fields of ``compiler_config_extra`` are those of 2.11, two that 2.13 has added, and 2.15's names of two.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor import config

from compile_remat._torch import sizes
from compile_remat._torch.version import private_name
from compile_remat.inductor.install import CustomPartitionerFn
from compile_remat.inductor.light_code.graph_state import CountsInside
from compile_remat.inductor.light_code.reading import Lowered
from compile_remat.inductor.observe import GraphCompiler

V = private_name("torch._inductor.virtualized", "V")
NullHandler = private_name("torch._inductor.virtualized", "NullHandler")
TritonBundler = private_name("torch._inductor.triton_bundler", "TritonBundler")
TracingContext = private_name("torch._guards", "TracingContext")
unset_fake_temporarily = private_name("torch._subclasses.fake_tensor", "unset_fake_temporarily")

OF_THE_BUNDLER = ("_entries", "_static_autotuners", "_winners")
"""Attributes of Inductor's bundler, which collects the Triton kernels of the graph being lowered for the graph cache."""

OF_ONE_LOWERING = ("_pre_fusion_custom_pass", "layout_optimization")
"""Inductor options that a compiler below `with_early_backward` sets for one graph, but not for a graph lowered inside of it."""

OF_ONE_GRAPH = ("static_input_idxs", "is_inference", "cudagraphs", "graph_id", "boxed_forward_device_index")
"""Options of ``compile_fx_inner`` that ``compile_fx_backward`` sets itself; all other options are the same for both graphs."""


class PartitionRecorder(CustomPartitionerFn):
    """Calls a partitioner, and keeps the two graphs that it made until the forward is compiled."""

    def __init__(self, partitioner: CustomPartitionerFn) -> None:
        self.partitioner = partitioner
        self.made: list[tuple[fx.GraphModule, fx.GraphModule]] = []
        # Positions of saved activations that the backward being compiled may overwrite.
        self.overwritten: tuple[int, ...] = ()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs = self.partitioner(gm, joint_inputs, **kwargs)
        self.made.append(graphs)
        return graphs

    def uuid(self) -> object:
        """Identity of the partitioner for torch's caches, and the positions that the backward may overwrite.

        Torch's graph cache does not ask for these positions, and would return the early backward's code for a backward that keeps
        its graph.  Torch's cache of joint graphs asks before there is a backward, and gets the partitioner's identity alone.
        """
        return (self.partitioner.uuid(), *self.overwritten) if self.overwritten else self.partitioner.uuid()

    def __deepcopy__(self, memo: object) -> PartitionRecorder:  # a copied option still records here
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # a cache key must not hold graphs
        return (PartitionRecorder, (self.partitioner,))

    def backward_of(self, forward: fx.GraphModule) -> fx.GraphModule | None:
        """The backward of a forward, None if unknown; to be called once, as the recorder then drops both graphs."""
        backward = next((backward for made, backward in self.made if made is forward), None)
        self.made = [graphs for graphs in self.made if graphs[0] is not forward]
        return backward


def with_early_backward(compiler: GraphCompiler, recorder: PartitionRecorder) -> GraphCompiler:
    """Returns `compiler`, which also compiles each backward with its forward, and returns that result when torch asks for it.

    The backward is compiled while the forward is lowered and has no code yet: if the lowered backward is refused, no code was
    made.  Under CUDA graphs the backward depends on the partitions of the forward's code, and is compiled after that code.
    """
    early: list[tuple[object, Any]] = []

    def lower(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        recorder.overwritten = _overwritten()
        try:
            return compiler(gm, example_inputs, **options)
        finally:
            recorder.overwritten = ()

    def compile_backward(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        conditions = _conditions(gm, example_inputs, options)
        early.append((conditions, lower(gm, example_inputs, **options)))

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        if options.get("is_backward"):
            conditions = _conditions(gm, example_inputs, options) if early else None
            known = [compiled for then, compiled in early if then == conditions]
            early.clear()
            return known[0] if known else lower(gm, example_inputs, **options)
        backward, context = recorder.backward_of(gm), TracingContext.try_get()
        if backward is None or context is None or context.fw_metadata.num_symints_saved_for_bw:
            return compiler(gm, example_inputs, **options)
        outside = {name: getattr(config, name) for name in OF_ONE_LOWERING}
        inside: CountsInside | None = None

        def compile_inside(lowered: Lowered) -> None:
            nonlocal inside
            inside = CountsInside()
            with config.patch(outside), _lowering_inside():
                _compile_now(backward, context, lowered, lowered.output_strides, options, compile_backward)
            inside.take()

        nested = {} if options.get("cudagraphs") else {"after_lowering": compile_inside}
        compiled = compiler(gm, example_inputs, **nested, **options)
        if inside is not None:
            inside.give_back()
        else:  # the forward came out of a cache, or could not be read
            _compile_now(backward, context, compiled, context.output_strides, options, compile_backward)
        return compiled

    return compile_graph


def _compile_now(
    backward: fx.GraphModule,
    context: Any,
    forward: Any,
    strides: Sequence[Sequence[int] | None] | None,
    options: Mapping[str, Any],
    compiler: GraphCompiler,
) -> None:
    """Compile a copy of the backward, as AOTAutograd's ``_aot_stage2b_bw_compile`` does.

    Args:
        forward: Inductor's result for the forward, or the `Lowered` forward.
        strides: Strides of the forward's outputs.
    """
    inputs = _inputs(backward, context, strides or [])
    partitions = getattr(forward, "partition_maps", None) or ()
    is_uncaptured = bool(partitions) and getattr(forward, "has_uncaptured_partition", False)
    device = options.get("boxed_forward_device_index")
    extra: Any = SimpleNamespace(
        cudagraphs=options.get("cudagraphs"),
        graph_id=options.get("graph_id"),
        forward_device=device,
        forward_device_index=device,
        forward_is_partitioned=SimpleNamespace(value=len(partitions) > 1),
        forward_is_cudagraph_partitioned=SimpleNamespace(value=is_uncaptured),
        cudagraphs_bwd_override=None,
    )
    shared = {name: value for name, value in options.items() if name not in OF_ONE_GRAPH}
    with unset_fake_temporarily():  # lifted constants are real tensors
        copied = copy.deepcopy(backward)
    with _as_backward(context):
        inductor.compile_fx_backward(
            copied, inputs, compiler_config_extra=extra, inner_compile=partial(compiler, **shared)
        )


@contextmanager
def _lowering_inside() -> Iterator[None]:
    """Sets aside the state that Inductor keeps for the graph being lowered, so that another graph can be lowered inside."""
    kept = {name: getattr(TritonBundler, name) for name in OF_THE_BUNDLER if hasattr(TritonBundler, name)}
    try:
        for name in kept:
            setattr(TritonBundler, name, None)
        with V.set_distributed_autotune_state(NullHandler()):
            yield
    finally:
        for name, value in kept.items():
            setattr(TritonBundler, name, value)


def _inputs(backward: fx.GraphModule, context: Any, forward_strides: Sequence[Sequence[int] | None]) -> list[Any]:
    """Fake inputs of the backward; saved activations have the strides that the compiled forward returns them with."""
    inputs = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    saved_strides = forward_strides[context.fw_metadata.tensors_saved_for_backwards_slice]
    for position, strides in enumerate(saved_strides):
        value = inputs[position]
        if isinstance(value, torch.Tensor) and strides is not None and sizes.hint_strides(value) != tuple(strides):
            inputs[position] = value.as_strided(value.size(), strides)
    return inputs


@contextmanager
def _as_backward(context: Any) -> Iterator[None]:
    """Inside, the tracing context of a forward serves as the tracing context of its backward."""
    strides, name = context.output_strides, context.aot_graph_name
    context.output_strides = None  # Inductor fills a list that it finds here
    context.aot_graph_name = [part.replace("forward", "backward") for part in name] if name else name
    try:
        yield
    finally:
        context.output_strides, context.aot_graph_name = strides, name


def _conditions(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> object:
    """The conditions on which a backward's code depends and that can differ between its two compilations.

    These are the graph, the strides of its inputs, the positions with a fixed address under CUDA graphs, and the positions that the
    backward may overwrite: none if the first backward keeps its graph.
    """
    strides = [sizes.hint_strides(x) if isinstance(x, torch.Tensor) else None for x in example_inputs]
    return str(gm.graph), strides, list(options.get("static_input_idxs") or []), _overwritten()


def _overwritten() -> tuple[int, ...]:
    """Positions of the saved activations that the backward being compiled may overwrite."""
    context = TracingContext.try_get()
    return tuple(getattr(context and context.fw_metadata, "bw_donated_idxs", None) or ())
