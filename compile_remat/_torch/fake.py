"""Tracing without data: fake tensors, and the device that they claim to be on.

Imports nothing of compile_remat.  Same in 2.11 to 2.15: ``FakeTensorMode``, ``FakeTensor.fake_device``, ``TorchDispatchMode``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
