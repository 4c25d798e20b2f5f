"""Entering Inductor, and keeping it to the plan.  Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15.

Imports nothing of ours but `_torch_fusion`, `_torch_order` and `_torch_version`.  `compile_with_partitioner` hands a partitioner to
``compile_fx`` through Inductor's own extension point; `GuardedChoices` is scoped by ``V.set_choices_handler`` around the
compilation of each graph, the late one of the backward included, so nothing of torch is patched and plain Inductor in
the same process is not touched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import compile as compile_with_inductor
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config

from compile_remat._torch.version import private_module, private_name
from compile_remat.inductor.fusion_guard import GuardedChoices as GuardedChoices
from compile_remat.inductor.kernel_order import KernelsMovedUp

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
else:
    CustomPartitionerFn = private_name("torch._inductor.custom_graph_pass", "CustomPartitionerFn")
T = TypeVar("T")

get_hash_for_files = private_name("torch._inductor.custom_graph_pass", "get_hash_for_files")
V = private_name("torch._inductor.virtualized", "V")
TracingContext = private_name("torch._guards", "TracingContext")
graph_compile = private_module("torch._functorch._aot_autograd.graph_compile")

PARTITIONER_OPTION = "custom_partitioner_fn"
"""The option of Inductor that holds a partitioner."""


@dataclass(frozen=True)
class Emitted:
    """What Inductor made of one graph.

    Attributes:
        source_code: Its output code.
        inputs: What the code is called with: tensors, real or fake, and sizes.
        names: The graph's placeholders, one for each input.
        num_outputs: How many values it returns.
        is_backward: Whether it is the backward of another graph.
    """

    source_code: str
    inputs: tuple[object, ...]
    names: tuple[str, ...]
    num_outputs: int
    is_backward: bool


Observer = Callable[[Emitted], None]


def compile_with_partitioner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: CustomPartitionerFn,
    options: Mapping[str, Any],
    *,
    guarded: bool,
    observer: Observer | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, `partitioner` choosing what to save.

    The options go in as ``config_patches``, which also reach the backward where that is compiled later, out of scope.

    Args:
        guarded: Keep Inductor's fusions to the plan.
        observer: Sees what Inductor emits, also where it is found in the cache of graphs; then the backward is compiled with
            the forward, symbolic sizes or not.  What comes out of the cache of partitions is not seen.
    """
    patches = {**options, PARTITIONER_OPTION: partitioner}
    inner = _inner_compile(guarded, observer)
    with _backward_compiled_early() if observer else nullcontext():
        return _callable(inductor.compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=patches))


@contextmanager
def _backward_compiled_early() -> Iterator[None]:
    """Backwards are compiled with their forwards, but torch is told only where it would have done so itself.

    What torch knows of a backward is final: one that overwrites what was saved then refuses ``retain_graph=True``, and its
    cache entry is written before a backward ran.  Left alone, torch compiles at the first backward, for what that one asks.
    """
    original = graph_compile._aot_stage2b_bw_compile
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_backward(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        lazy_backward_info, compiled = original(*args, **kwargs)
        has_sizes = signature.bind(*args, **kwargs).arguments["num_symints_saved_for_bw"] > 0
        return lazy_backward_info, compiled if has_sizes else None

    graph_compile._aot_stage2b_bw_compile = compile_backward
    try:
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            yield
    finally:
        graph_compile._aot_stage2b_bw_compile = original


@contextmanager
def _kept_to_the_plan() -> Iterator[None]:
    """Inductor joins and orders kernels as the plan's peak needs it; a pass that the user set before fusion stays alone."""
    first = inductor_config._pre_fusion_custom_pass or KernelsMovedUp()
    with V.set_choices_handler(GuardedChoices()), inductor_config.patch(_pre_fusion_custom_pass=first):
        yield


def _inner_compile(guarded: bool, observer: Observer | None) -> Callable[..., Any]:
    """``compile_fx_inner``, under `GuardedChoices` and observed."""
    early: list[tuple[list[int], Any]] = []  # the backward, until torch asks for it

    def compile_one(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        overwritten = _overwritten_inputs()
        if is_backward and early:
            overwritten_then, compiled = early.pop()
            if overwritten_then == overwritten:
                return compiled
        names = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
        num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        inputs = tuple(example_inputs)
        with _kept_to_the_plan() if guarded else nullcontext():
            compiled = inductor.compile_fx_inner(gm, example_inputs, **kwargs)
        source_code = getattr(compiled, "source_code", None)
        if observer is not None and isinstance(source_code, str):
            observer(Emitted(source_code, inputs, names, num_outputs, is_backward))
        if observer is not None and is_backward:
            early.append((overwritten, compiled))
        return compiled

    return compile_one if guarded or observer else inductor.compile_fx_inner


def _overwritten_inputs() -> list[int]:
    """Positions of the saved values that the backward may overwrite: none where the first backward keeps its graph."""
    context = TracingContext.try_get()
    return list(getattr(context and context.fw_metadata, "bw_donated_idxs", None) or [])


def compile_plain(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Inductor as it is, by its documented entrance: also for a torch that we know nothing of."""
    return _callable(compile_with_inductor(gm, list(example_inputs), options=dict(options)))


def _callable(compiled: Any) -> Callable[..., Any]:
    """What ``compile_fx`` returns for a graph module is callable; its type also covers ahead-of-time packages."""
    function: Callable[..., Any] = compiled
    return function


def compile_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], partitioner: CustomPartitionerFn
) -> Callable[..., Any]:
    """Run the two FX graphs as they are, with Inductor's decompositions but without its passes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=boxed_nop,
        partition_fn=partitioner,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = backend(gm, list(example_inputs))
    return compiled


class _Left(Exception):
    """Leaves the compiler once the joint graph was seen."""


class _Look(CustomPartitionerFn):
    """A partitioner that shows the joint graph to `see`, keeps what it makes of it and compiles nothing."""

    def __init__(self, see: Callable[[fx.GraphModule, dict[str, Any]], Any] | None = None) -> None:
        self.see = see
        self.found: Any = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        keywords = {name: kwargs.get(name) for name in ("num_fwd_outputs", "static_lifetime_input_indices")}
        assert self.see is not None
        self.found = self.see(gm, keywords)
        raise _Left

    def uuid(self) -> object:
        """Always the same: nothing is ever stored under it."""
        return "compile_remat looks at the joint graph"

    def __reduce__(self) -> tuple[Any, ...]:  # the cache key must not hold graphs
        return (_Look, ())


def look_at_joint_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    see: Callable[[fx.GraphModule, dict[str, Any]], T],
    options: Mapping[str, Any],
    compiler: str = "inductor",
) -> T | None:
    """What `see` makes of the joint graph of a Dynamo graph and of its `num_fwd_outputs` and `static_lifetime_input_indices`.

    `see` runs where a partitioner would, under `options`; nothing is compiled.  None where the graph has no backward, and is
    compiled after all.

    Args:
        compiler: `inductor` or `eager`.
    """
    look = _Look(see)
    try:
        if compiler == "eager":
            compile_eager(gm, example_inputs, look)
        else:
            compile_with_partitioner(gm, example_inputs, look, options, guarded=False)
    except _Left:
        pass
    found: T | None = look.found
    return found


@contextmanager
def without_partition_cache() -> Iterator[None]:
    """AOTAutograd partitions anew: on a hit of its cache no partitioner runs.  Compiled kernels are still found."""
    with functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        yield


_replaced: dict[str, Any] = {}
"""What Inductor's own settings were before `set_global_partitioner`."""


def set_global_partitioner(partitioner: CustomPartitionerFn | None, options: Mapping[str, Any] | None = None) -> None:
    """Inductor's process-wide partitioner, with process-wide options; None restores what was there before."""
    from torch._inductor import config

    for name, value in _replaced.items():
        setattr(config, name, value)
    _replaced.clear()
    if partitioner is not None:
        wanted = {**(options or {}), PARTITIONER_OPTION: partitioner}
        _replaced.update({name: getattr(config, name) for name in wanted})
        for name, value in wanted.items():
            setattr(config, name, value)
