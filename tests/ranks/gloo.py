"""Collectives of FSDP2 on gloo that hold their tensors no longer than they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

TIMEOUT_S = 60.0


@contextmanager
def waiting_for_threads() -> Iterator[None]:
    """A collective of FSDP2 returns only when the thread that ran it has let go of its tensors.

    Gloo runs a collective in one of two threads, wakes the caller, and drops its references to input and output afterwards, on a
    busy machine much later.  If the caller has dropped its own by then, that thread frees the memory.  The profiler does not watch
    it: the buffer would count as held.  Gloo's reduce-scatter also sums into a copy of its input, which only gloo refers to.  Here
    the ranks exchange the parts into a buffer of that size, and the caller sums them.
    """
    gather, reduce = _waiting(torch.distributed.all_gather_single), _reduce_scatter(torch.distributed.all_to_all_single)
    with mock.patch.multiple(torch.distributed, all_gather_single=gather, reduce_scatter_single=reduce):
        yield


def _reduce_scatter(exchange: Callable[..., Any]) -> Callable[..., None]:
    def reduce_scatter(output: Tensor, input: Tensor, *, group: Any, op: Any, async_op: bool = False) -> None:
        ops = torch.distributed.ReduceOp
        assert op in (ops.SUM, ops.AVG) and not async_op
        received = torch.empty_like(input)
        _waiting(exchange)(received, input, group=group)
        parts = received.view(-1, output.numel())
        torch.sum(parts, 0, out=output)
        if op == ops.AVG:  # not by `torch.mean`, which takes memory for itself in bfloat16
            output.div_(len(parts))

    return reduce_scatter


def _waiting(call: Callable[..., Any]) -> Callable[..., None]:
    def waiting(*args: Any, **kwargs: Any) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        before = list(map(_num_references, tensors))
        assert call(*args, **kwargs) is None  # not asynchronous: a caller's work would hold the tensors
        deadline = time.monotonic() + TIMEOUT_S
        while any(_num_references(t) > n for t, n in zip(tensors, before, strict=True)):
            assert time.monotonic() < deadline, "a thread of gloo holds the tensors of a collective that has ended"
            time.sleep(0)

    return waiting


def _num_references(tensor: Tensor) -> int:
    """To the tensor, which the thread holds, and to its storage, which views of it hold."""
    return tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
