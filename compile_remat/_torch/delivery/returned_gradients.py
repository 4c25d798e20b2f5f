"""Early gradients that the backward returns at its end after all, as autograd expects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile_remat._torch.autograd_node import Backward, compiled_node, intercept_backward, sequence_number
from compile_remat._torch.delivery.delivery_ops import Place, receiving

Compiled = Callable[..., Any]


class HandedBack:
    """Gradients that wait for the end of their backward, by their positions among its outputs."""

    def __init__(self) -> None:
        self.gradients: dict[int, torch.Tensor] = {}

    def keep(self, gradient: torch.Tensor, place: Place) -> None:
        """Keep a gradient, as a copy if it shares memory with other tensors."""
        self.gradients[place.index] = gradient.clone() if place.copied else gradient

    def completed(self, returned: Any) -> Any:
        """Returns the outputs of the backward, with the kept gradients in their places."""
        if not self.gradients:
            return returned
        found = list(returned)
        for index, gradient in self.gradients.items():
            assert found[index] is None, "a gradient is delivered or returned, never both"
            found[index] = gradient
        return tuple(found)


def handing_back(compiled: Compiled) -> Compiled:
    """Wrap `compiled` so that its backwards return every gradient at their end: for runs beside training, and without a region."""

    def call(*args: Any) -> Any:
        since = sequence_number()
        outputs = compiled(*args)
        node = compiled_node(outputs, since) if isinstance(outputs, tuple | list) else None
        if node is not None:
            intercept_backward(node, _backward)
        return outputs

    return call


def _backward(node: Any, original: Backward, arguments: tuple[Any, ...]) -> Any:
    handed = HandedBack()
    with receiving(handed.keep):
        returned = original(node, *arguments)
    return handed.completed(returned)
