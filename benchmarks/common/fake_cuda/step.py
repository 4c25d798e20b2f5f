"""One training step of a model on the fake device: its Dynamo graph, compiled again and again, and never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_remat._torch.cuda_sdpa import use_cuda_attention
from compile_remat.backend import compile_graph
from compile_remat.config import RematConfig
from compile_remat.inductor.observe import Emitted, observed

DEVICE = "h100-sxm"
Built = tuple[Callable[..., Any], Sequence[Any]]
Compile = Callable[[fx.GraphModule, Sequence[Any]], object]


def compile_step(build: Callable[[], Built], use: Compile) -> list[Emitted]:
    """Build a step on the fake device, let `use` compile its graph, return the code of each forward and backward.

    Attention becomes what an H100 runs: without a driver torch's own choice is the explicit products.
    """
    emissions: list[Emitted] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for part in gm.modules():  # checkpointed blocks are graphs of their own
            if isinstance(part, fx.GraphModule):
                use_cuda_attention(part, has_flash=True)
        inner = compile_fx.compile_fx_inner
        compile_fx.compile_fx_inner = observed(inner, emissions.append)
        try:
            use(gm, example_inputs)
        finally:
            compile_fx.compile_fx_inner = inner
        return gm.forward

    torch.compiler.reset()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        inductor_config.patch(force_disable_caches=True),
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
    ):
        with torch.device("cuda"):
            module, inputs = build()
        torch.compile(module, backend=backend)(*inputs)
    pairs = (
        emissions[k : k + 2] for k in range(0, len(emissions), 2)
    )  # our backend has the backward's code made first
    return [each for pair in pairs for each in sorted(pair, key=lambda emitted: emitted.is_backward)]


def ours(
    memory_budget: int | str, patches: Mapping[str, Any] | None = None, device: str = DEVICE, **settings: Any
) -> Compile:
    """Our backend at a budget, on a device by name or file; `patches` are Inductor's options, `settings` others of ours.

    Dynamo wraps a RematError that comes of it.
    """
    config = RematConfig.resolve({"memory_budget": memory_budget, "device": device, **settings})

    def use(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
        return compile_graph(gm, example_inputs, config, dict(patches or {}))

    return use


def torchs(ratio: float, patches: Mapping[str, Any] | None = None) -> Compile:
    """Torch's own partitioner at an ``activation_memory_budget``; `patches` are Inductor's options."""

    def use(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
        with functorch_config.patch(activation_memory_budget=ratio):
            inner = compile_fx.compile_fx_inner
            return compile_fx.compile_fx(
                gm, list(example_inputs), inner_compile=inner, config_patches=dict(patches or {})
            )

    return use
