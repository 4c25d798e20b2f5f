"""Collectives of FSDP2 on gloo that hold their tensors no longer than they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

COLLECTIVES = ("all_gather_single", "reduce_scatter_single")
"""What FSDP2 calls, of `torch.distributed`."""

TIMEOUT_S = 60.0


@contextmanager
def waiting_for_threads() -> Iterator[None]:
    """A collective of FSDP2 returns only when the thread that ran it has let go of its tensors.

    Gloo runs a collective in one of two threads, wakes the caller, and drops its references to input and output afterwards, on a
    busy machine much later.  If the caller has dropped its own by then, that thread frees the memory.  The profiler does not watch
    it: the buffer would count as held.
    """
    with ExitStack() as stack:
        for name in COLLECTIVES:
            call = getattr(torch.distributed, name)
            stack.enter_context(mock.patch.object(torch.distributed, name, _waiting(call)))
        yield


def _waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(*args: Any, **kwargs: Any) -> Any:
        storages = [t.untyped_storage() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        before = list(map(_num_references, storages))
        work = call(*args, **kwargs)
        assert work is None or work.is_completed()
        deadline = time.monotonic() + TIMEOUT_S
        while any(_num_references(s) > n for s, n in zip(storages, before, strict=True)):
            assert time.monotonic() < deadline, "a thread of gloo holds the tensors of a collective that has ended"
            time.sleep(0)
        return work

    return waiting


def _num_references(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)
