"""Two operators: one marks a gradient in a joint graph, the other hands a gradient over while a backward runs.

`GRADIENT_READY` stands in a joint graph in the place of a gradient among its outputs, so that dead code, classification and
extraction treat the gradient as they treat any other; it never runs.  `DELIVER` takes its place in the backward graph.  It returns
nothing and counts as writing into the gradient and into the parameter: so Inductor keeps every kernel that reads one of them before
it, and never drops it.

The schema's tags: `cudagraph_unsafe`, since a replay would skip the hooks, and `flexible_layout`, since any layout will do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

NAMESPACE = "compile_remat"

_TAGS = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe", "flexible_layout") if hasattr(torch.Tag, name)]
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define("gradient_ready(Tensor gradient, bool copied) -> Tensor")
_LIBRARY.define(
    "deliver_gradient(Tensor(a!) gradient, Tensor(b!)[] parameter, int index, int edge, int edges, bool copied) -> ()",
    tags=_TAGS,
)

GRADIENT_READY: Any = torch.ops.compile_remat.gradient_ready.default
DELIVER: Any = torch.ops.compile_remat.deliver_gradient.default


MOVED = -1
"""The edge of a gradient that may not leave early, since something behind it reads the parameter."""


@dataclass(frozen=True)
class Place:
    """Where a gradient belongs.

    Attributes:
        index: Its position among what the backward returns.
        edge: The position of its argument among the tensors that the graph takes: of the edge in ``next_functions``; or `MOVED`.
        edges: How many tensors the graph takes.
        copied: Whether its memory belongs to others as well, so that it has to be copied.
    """

    index: int
    edge: int
    edges: int
    copied: bool


Receiver = Callable[[torch.Tensor, Place], None]


class _Receivers(threading.local):
    """The receivers of the backwards that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Receiver] = []


_receivers = _Receivers()


@contextmanager
def receiving(receiver: Receiver) -> Iterator[None]:
    """Inside, `receiver` gets the gradients that a backward of this thread hands over."""
    _receivers.stack.append(receiver)
    try:
        yield
    finally:
        _receivers.stack.pop()


def _ready(gradient: torch.Tensor, copied: bool) -> torch.Tensor:
    return gradient.new_empty(0)


def _deliver(
    gradient: torch.Tensor, parameter: Sequence[torch.Tensor], index: int, edge: int, edges: int, copied: bool
) -> None:
    if not _receivers.stack:
        raise RuntimeError(
            "compile_remat: a backward that was compiled with gradients = 'early' runs where nobody takes its gradients, as "
            "under compiled autograd. Compile the model with gradients = 'end'."
        )
    _receivers.stack[-1](gradient, Place(index, edge, edges, copied))


def _deliver_fake(
    gradient: torch.Tensor, parameter: Sequence[torch.Tensor], index: int, edge: int, edges: int, copied: bool
) -> None:
    return None


_LIBRARY.impl("gradient_ready", _ready, "CompositeExplicitAutograd")
_LIBRARY.impl("deliver_gradient", _deliver, "CompositeExplicitAutograd")
for _key in ("Autograd", "ADInplaceOrView"):  # hooks run as if no operator were around them
    _LIBRARY.impl("deliver_gradient", torch.library.fallthrough_kernel, _key)
torch.library.register_fake(f"{NAMESPACE}::gradient_ready", _ready, lib=_LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::deliver_gradient", _deliver_fake, lib=_LIBRARY)
torch.fx.node.has_side_effect(DELIVER)


def forget_mutation_regions(graph: torch.fx.Graph) -> None:
    """Have Inductor number the stretches between its mutating operators anew, so that it joins nothing across a delivery.

    It writes the numbers into ``meta`` when it first looks for patterns: in a joint graph, where nothing is delivered yet.
    """
    for node in graph.nodes:
        node.meta.pop("mutation_region_id", None)
