"""What a convolution or an attention takes beside its outputs while it runs on a CPU.

Imports nothing of ours but `version`.  oneDNN copies weights, and inputs of other than its own layout, into blocks of 16
channels, sums gradients for each group of threads by itself, and takes scratch memory that depends on the processor and the
number of threads; flash attention takes blocks of scores for each thread.  There is no rule to copy: the kernel is run once
on tensors of the real sizes, and the allocator's events are read.

Private names, same in 2.11 to 2.15: ``torch.autograd._enable_profiler_legacy`` and ``_disable_profiler_legacy`` (they see
this thread's allocations and print nothing), ``torch.utils._python_dispatch._disable_current_modes``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_remat._torch import conv_layout, sizes
from compile_remat._torch.version import private_name

_AUTOGRAD, _PROFILER = "torch.autograd", "torch._C._profiler"
ProfilerConfig = private_name(_AUTOGRAD, "ProfilerConfig")
ProfilerState = private_name(_AUTOGRAD, "ProfilerState")
enable_profiler = private_name(_AUTOGRAD, "_enable_profiler_legacy")
disable_profiler = private_name(_AUTOGRAD, "_disable_profiler_legacy")
ExperimentalConfig = private_name(_PROFILER, "_ExperimentalConfig")
disable_current_modes = private_name("torch.utils._python_dispatch", "_disable_current_modes")

LOG = logging.getLogger("compile_remat")

aten = torch.ops.aten
CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
ATTENTIONS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)
MEASURED = CONVOLUTIONS | ATTENTIONS
"""Operators that read nothing but the sizes and strides of their inputs to decide what to allocate."""


@dataclass(frozen=True)
class Dense:
    """A tensor without its contents."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def node_workspace_bytes(node: fx.Node) -> int:
    """Bytes for a convolution, under the layout that Inductor gives it, or an attention on a CPU; 0 for all else.

    The first question of its kind runs the kernel once, on uninitialised tensors of the node's sizes.
    """
    if node.target not in MEASURED:
        return 0
    values = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if any(t.device.type != "cpu" for t in tensors):
        return 0
    strides = conv_layout.convolution_strides if node.target in CONVOLUTIONS else sizes.hint_strides
    return workspace_bytes(node.target, [_without_contents(v, strides) for v in values], node.kwargs)


def _without_contents(value: object, strides: Callable[[torch.Tensor], tuple[int, ...]]) -> object:
    if isinstance(value, torch.Tensor):
        return Dense(sizes.hint_shape(value), strides(value), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_without_contents(v, strides) for v in value)
    return sizes.hint_int(value) if isinstance(value, torch.SymInt) else value


def workspace_bytes(target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """Most bytes that `target` holds at once beyond its outputs; 0 for an operator or a device that is not measured.

    Args:
        args: The operator's, with a `Dense` in place of each tensor.
    """
    if target not in MEASURED:
        return 0
    try:
        return _measured(target, _frozen(args), tuple(sorted(kwargs.items())), torch.get_num_threads())
    except RuntimeError as error:  # no memory for it, or the user profiles this very step
        LOG.info("the workspace of %s is not known: %s", target, error)
        return 0


@functools.lru_cache(maxsize=4096)
def _measured(target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], threads: int) -> int:
    """`threads` only tells one count from another."""
    with disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        inputs = [_tensor(a) if isinstance(a, Dense) else a for a in args]
        events, result = _allocations(target, inputs, dict(kwargs))
        results = result if isinstance(result, tuple) else (result,)
        kept = sum(t.untyped_storage().nbytes() for t in results if isinstance(t, torch.Tensor))
    level = peak = 0
    for nbytes in events:
        level += nbytes
        peak = max(peak, level)
    return max(0, peak - kept)


def _allocations(target: Any, inputs: list[Any], kwargs: dict[str, Any]) -> tuple[list[int], Any]:
    """The allocator's events in order, bytes freed negative, and the result."""
    # input shapes, memory, stacks, flops, modules
    enable_profiler(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, ExperimentalConfig()))
    try:
        result = target(*inputs, **kwargs)
    finally:
        records = disable_profiler()
    events = [event.cpu_memory_usage() for thread in records for event in thread if event.kind() == "memory_alloc"]
    return events, result


def _tensor(dense: Dense) -> torch.Tensor:
    return torch.empty_strided(dense.shape, dense.strides, dtype=dense.dtype)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value
