"""Gradients that leave a compiled backward when they are made, and the choice of those that wait until it ends.

A delivery carries only positions.  The parameter is found through the running autograd node, so cached code serves any model.
If autograd would do more than accumulate into a leaf, the gradient is handed back: the backward returns it at its end, as usual.
This is decided for each gradient before anything of its parameter has changed.  The rewrite of the graph is
`passes.graph.rewrites.early_gradients`, whose docstring names the other parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_remat._torch.autograd_node import Backward, keeps_its_graph
from compile_remat._torch.delivery import leaves
from compile_remat._torch.delivery.delivery_ops import MOVED, Place, receiving
from compile_remat._torch.delivery.returned_gradients import HandedBack
from compile_remat.errors import GradientError, warn
from compile_remat.ranks.wrappers import is_wrapped
from compile_remat.runtime.region import CallInFlight, Hook

SHARED = "a parameter is in several graphs that run before their backwards do, or its graph runs several times"


@dataclass
class _Leaves:
    """The parameters of a call that waits for its backward.

    Attributes:
        ids: Ids of the leaves that the call takes.
        at_the_end: Ids of the leaves whose gradients do not leave early, with the reason.
    """

    ids: frozenset[int]
    at_the_end: dict[int, str] = field(default_factory=dict)


_WAITING: weakref.WeakKeyDictionary[CallInFlight, _Leaves] = weakref.WeakKeyDictionary()
"""Calls that wait for their backwards, with their leaves: a parameter in two of these calls gets gradients from both."""


class EarlyGradients(Hook):
    """The hook of a region whose gradients leave early."""

    def __init__(self) -> None:
        self._warned = set[str]()

    def after_forward(self, call: CallInFlight, args: Sequence[Any], node: Any) -> None:
        """Record the leaves that the call takes, and the leaves whose gradients cannot leave early."""
        found = [n.variable for n in leaves.leaf_nodes(node) if n is not None]
        note = _Leaves(frozenset(map(id, found)))
        for shared in leaves.shared_storages(args) & note.ids:
            note.at_the_end[shared] = "a parameter shares its memory with another argument"
        if is_wrapped():
            note.at_the_end |= dict.fromkeys(note.ids, "the model is under DDP or FSDP2")
        _WAITING[call] = note

    def backward(self, call: CallInFlight, run: Backward, *arguments: Any) -> Any:
        """Run the backward; returns its gradients, without those that have left early."""
        delivery = _Delivery(call, leaves.current_node())
        with receiving(delivery.receive):
            returned = run(*arguments)
        for reason in sorted(delivery.reasons - self._warned):
            warn(
                f"gradients = early: some leave the backward at its end, and the peak may be above the predicted one: {reason}"
            )
        self._warned |= delivery.reasons
        return delivery.handed.completed(returned)


class _Delivery:
    """One backward, and the gradients that it has handed over."""

    def __init__(self, call: CallInFlight, node: Any) -> None:
        self.call, self.nodes = call, leaves.leaf_nodes(node)
        self.own = _WAITING.get(call)
        self.handed = HandedBack()
        self.reasons = set[str]()
        self.reason = ""
        if torch.is_grad_enabled():
            self.reason = "create_graph: the gradients are differentiated again"
        elif keeps_its_graph():
            self.reason = "retain_graph: the backward runs again"
        elif self.own is None:
            self.reason = "the forward of this backward was not seen"

    def receive(self, gradient: torch.Tensor, place: Place) -> None:
        """Take a gradient: accumulate it and run the hooks behind it, or keep it until the backward ends.

        Raises:
            GradientError: The running node has another number of tensor arguments than the code.
        """
        if place.edges != len(self.nodes):
            raise GradientError(
                f"gradients = early: the code of a graph takes {place.edges} tensors, but its autograd node {len(self.nodes)}. "
                "Please report this, and set gradients = 'end' until it is mended."
            )
        node = self.nodes[place.edge]
        reason = self._why_at_the_end(node, gradient, place)
        if reason:
            self.reasons.add(reason)
            self.handed.keep(gradient, place)
            return
        leaf = node.variable
        self.call.num_delivered += 1
        leaves.set_hooks_aside(node, _complain)
        is_owned = not place.copied and leaves.owns_its_memory(gradient)
        leaves.accumulate(leaf, gradient, is_owned=is_owned)
        leaves.run_accumulated_hooks(leaf)

    def _why_at_the_end(self, node: Any, gradient: torch.Tensor, place: Place) -> str:
        if self.reason or self.own is None:
            return self.reason
        if place.edge == MOVED:
            return "Inductor put a kernel that reads a parameter behind its gradient"
        if node is None:
            return "an argument was a leaf when the graph was compiled, and is not one now"
        key = id(node.variable)
        if key in self.own.at_the_end:
            return self.own.at_the_end[key]
        others = [n for c, n in list(_WAITING.items()) if c is not self.call and c.is_in_flight and key in n.ids]
        for other in others:
            other.at_the_end[key] = SHARED  # its gradient is added to this one, which waits in the engine
        return SHARED if others else leaves.why_at_the_end(node, gradient)


def _complain(leaf: torch.Tensor) -> None:
    """Raise: the engine has another contribution to the gradient of a leaf that got its gradient early."""
    raise GradientError(
        f"a parameter of shape {tuple(leaf.shape)} got a gradient early and gets another one in the same backward, from code that "
        "is not compiled or is compiled with gradients = 'end'; its hooks have run on a part of the gradient. "
        "Compile that code with gradients = 'early' as well, or set gradients = 'end'."
    )
