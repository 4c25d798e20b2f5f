"""Tracing without data: fake tensors, and the device that they claim to be on.

Imports nothing of compile_remat but `operators`.  Same in 2.11 to 2.15: ``FakeTensorMode``, ``FakeTensor.fake_device``,
``TorchDispatchMode``, the exceptions of operators that need data, and ``ShapeEnv.suppress_guards``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compile_remat._torch.operators import can_run_alone

UNKNOWN = object()
"""The result of an operator that cannot run without data."""

_NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
)


@contextmanager
def fake_tensors(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Make tensors fake inside this context: sizes, dtypes and strides without memory.  `dtype` is the default float dtype."""
    before = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True):
        if dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


class NumbersAreZero(TorchDispatchMode):
    """Returns zero (or False) for ``item()`` of a fake tensor.

    Needed while a model is built: ``torch.nn.init.trunc_normal_``, for example, reads a value to see if it has to draw again.
    """

    def __init__(self) -> None:  # torch's own __init__ has no annotations
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; return zero where a number was to be read from a fake tensor."""
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0


def say_device(module: fx.GraphModule, device: torch.device) -> None:
    """Let every fake tensor in the ``meta["val"]`` of a graph's nodes claim to be on `device`.

    Graphs of submodules follow.  Only for reading: an operator on a fake CUDA tensor ends the process if torch has no CUDA.
    """
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                value.fake_device = device


def copied_value(value: Any) -> Any:
    """Returns the fake tensor of a copy, on the device that `value` claims to be on; no operator runs on that device."""
    device = value.fake_device
    try:
        value.fake_device = torch.device("cpu")
        with value.fake_mode:
            copied = value.clone()
    finally:
        value.fake_device = device
    copied.fake_device = device
    return copied


def fake_result(node: fx.Node) -> Any:
    """Returns what a node's operator gives for the ``meta["val"]`` of its arguments; adds no guard.

    `UNKNOWN` for an operator that cannot run without data, that writes in place or waits for other processes, for an argument
    without a fake value, and on any device but a CPU and a CUDA device that is here: elsewhere no operator may run.

    Raises:
        Exception: The operator refuses its arguments.
    """
    nodes = node.all_input_nodes
    if not can_run_alone(node.target) and node.target is not operator.getitem:
        return UNKNOWN
    if any("val" not in each.meta for each in nodes):
        return UNKNOWN
    values = [leaf for each in (*nodes, node) for leaf in tree_leaves(each.meta.get("val"))]
    mode = detect_fake_mode(values)
    devices = {leaf.device.type for leaf in values if isinstance(leaf, torch.Tensor)}
    if mode is None or not all(map(_is_here, devices)):
        return UNKNOWN
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with ExitStack() as contexts:
        if mode.shape_env is not None:
            contexts.enter_context(mode.shape_env.suppress_guards())
            contexts.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        contexts.enter_context(mode)
        try:
            return target(*args, **kwargs)
        except _NEEDS_DATA:
            return UNKNOWN


def _is_here(device_type: str) -> bool:
    return device_type in ("cpu", "meta") or (device_type == "cuda" and torch.cuda.is_available())
