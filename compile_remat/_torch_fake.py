"""Private names of torch that tracing without data needs: fake tensors, and what device they claim to be on.

Imports nothing of ours.  Same in 2.11 to 2.15: ``FakeTensorMode``, ``FakeTensor.fake_device``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@contextmanager
def fake_tensors(dtype: torch.dtype | None = None) -> Iterator[None]:
    """All tensors made within have sizes, types and strides, and no memory; floating-point ones are of `dtype` unless told."""
    before = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True):
        if dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def say_device(module: fx.GraphModule, device: torch.device) -> None:
    """Let every fake tensor that a graph's nodes stand for claim to be on `device`.

    Only for reading: an operator that runs on a fake CUDA tensor ends a process whose torch has no CUDA.
    """
    for node in module.graph.nodes:
        for value in _flat(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                value.fake_device = device


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value
