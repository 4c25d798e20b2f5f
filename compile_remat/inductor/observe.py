"""What Inductor emits: the code of each graph that it compiles, handed to an observer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config

from compile_remat._torch.version import private_module, private_name
from compile_remat.inductor.fusion_guard import GuardedChoices
from compile_remat.inductor.kernel_order import KernelsMovedUp

V = private_name("torch._inductor.virtualized", "V")
TracingContext = private_name("torch._guards", "TracingContext")
graph_compile = private_module("torch._functorch._aot_autograd.graph_compile")


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


@contextmanager
def backward_compiled_early() -> Iterator[None]:
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


def inner_compile(guarded: bool, observer: Observer | None) -> Callable[..., Any]:
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
