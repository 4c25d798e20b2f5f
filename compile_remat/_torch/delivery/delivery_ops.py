"""Two operators: one marks a gradient in a joint graph, the other hands a gradient over while a backward runs.

`GRADIENT_READY` replaces a gradient among a joint graph's outputs, so that dead-code elimination, classification and extraction
treat the gradient like any other; the operator never runs.  `DELIVER` takes its place in the backward graph.  `DELIVER` returns
nothing, and its schema says that it writes into the gradient and the parameter.  So Inductor never removes the operator, and orders
it behind every kernel that reads one of the two.

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
"""The edge of a gradient that may not leave early, since a later node of the backward reads the parameter."""


@dataclass(frozen=True)
class Place:
    """The position of a gradient in its backward.

    Attributes:
        index: Position among the values that the backward returns.
        edge: Position of the parameter among the graph's tensor inputs, and of its edge in ``next_functions``; or `MOVED`.
        edges: Number of tensors among the graph's inputs.
        copied: True if the gradient shares memory with other tensors, so that it has to be copied.
    """

    index: int
    edge: int
    edges: int
    copied: bool


Receiver = Callable[[torch.Tensor, Place], None]


class _Receivers(threading.local):
    """Stack of the receivers of the backwards that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Receiver] = []


_receivers = _Receivers()


@contextmanager
def receiving(receiver: Receiver) -> Iterator[None]:
    """Inside this context, `receiver` gets the gradients that a backward of this thread delivers."""
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
            "compile_remat: a backward that was compiled with gradients = 'early' runs outside of its own step, as under "
            "compiled autograd, and its gradients would be lost. Compile the model with gradients = 'end'."
        )
    _receivers.stack[-1](gradient, Place(index, edge, edges, copied))


def _deliver_fake(
    gradient: torch.Tensor, parameter: Sequence[torch.Tensor], index: int, edge: int, edges: int, copied: bool
) -> None:
    return None


_LIBRARY.impl("gradient_ready", _ready, "CompositeExplicitAutograd")
_LIBRARY.impl("deliver_gradient", _deliver, "CompositeExplicitAutograd")
for _key in ("Autograd", "ADInplaceOrView"):  # hooks run with the dispatch keys that they have outside of operators
    _LIBRARY.impl("deliver_gradient", torch.library.fallthrough_kernel, _key)
torch.library.register_fake(f"{NAMESPACE}::gradient_ready", _ready, lib=_LIBRARY)
torch.library.register_fake(f"{NAMESPACE}::deliver_gradient", _deliver_fake, lib=_LIBRARY)
torch.fx.node.has_side_effect(DELIVER)


def forget_mutation_regions(graph: torch.fx.Graph) -> None:
    """Have Inductor renumber the regions between mutating operators, so that no pattern matches across a delivery.

    Inductor writes these numbers into ``meta`` when it first matches patterns: in the joint graph, which has no deliveries yet.
    """
    for node in graph.nodes:
        node.meta.pop("mutation_region_id", None)
