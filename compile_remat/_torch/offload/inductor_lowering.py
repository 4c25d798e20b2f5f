"""Inductor's side of the offload operators.

The tensor that leaves is written to memory first (``realize``): without that, Inductor may compute it a second time for the copy,
in a buffer whose end nothing waits for.  Inductor returns a saved tensor in the strides of the graph, or with channels last, and
would read the tensor on the host to get there, before its bytes have come: so the graph is told the strides that the tensor has.
The lowerings are registered in Inductor's table of lowerings, as any library's may be; no code of Inductor is replaced.

Private names, same in 2.11 to 2.15: ``ir.FallbackKernel.create``, and of ``GraphLowering`` the methods and attributes
``mark_buffer_mutated``, ``current_node``, ``never_reuse_buffers``, ``unaligned_buffers`` and ``nodes_prefer_channels_last``.
"""

from __future__ import annotations

from typing import Any

import torch

from compile_remat._torch.offload.offload_ops import ARRIVE, ARRIVED, FETCH, RELEASE, STASH
from compile_remat._torch.version import private_module, private_name

ir = private_module("torch._inductor.ir")
V = private_name("torch._inductor.virtualized", "V")
register_lowering = private_name("torch._inductor.lowering", "register_lowering")
TensorBox: Any = getattr(ir, "TensorBox", object)


def _stash(given: Any) -> Any:
    given.realize()
    host, ticket = ir.FallbackKernel.create(STASH, given)
    strides = tuple(map(int, host.get_stride()))
    for node in V.graph.current_node.users:
        if node.args[1] == 0:
            V.graph.nodes_prefer_channels_last.discard(node)
            with V.fake_mode:
                node.meta["val"] = torch.empty_strided(
                    node.meta["val"].size(), strides, dtype=host.get_dtype(), device="cpu"
                )
    return [TensorBox.create(host), TensorBox.create(ticket)]


def _release(given: Any, ticket: Any) -> None:
    V.graph.mark_buffer_mutated(given.get_name())  # lazy values that read it are computed before
    ir.FallbackKernel.create(RELEASE, given, ticket)


def _fetch(host: Any, ticket: Any, device: torch.device) -> Any:
    V.graph.never_reuse_buffers.add(host.get_name())
    results = ir.FallbackKernel.create(FETCH, host, ticket, device)
    V.graph.unaligned_buffers.discard(
        results[0].get_name()
    )  # torch's allocator makes it, whatever the host tensor's address
    return [TensorBox.create(made) for made in results]


def _arrive(made: Any, host: Any, arrival: Any) -> Any:
    ir.FallbackKernel.create(ARRIVED, made, host, arrival)
    return made


def register() -> None:
    """Register the lowerings with Inductor; one call is enough."""
    for operator, lowering in ((STASH, _stash), (RELEASE, _release), (FETCH, _fetch), (ARRIVE, _arrive)):
        register_lowering(operator, type_promotion_kind=None)(lowering)
