"""An entry of the zoo, and how models of libraries become modules with one loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.building import Built

Builder = Callable[[], Built]


@dataclass(frozen=True)
class Entry:
    """An architecture that we did not write, with random weights.

    Attributes:
        family: Kind of architecture: `encoder`, `convolutional`, `graph` and so on.
        library: The distribution that the model comes from; `torch` if the model is written here from its paper.
        build: Returns the module, whose output is a loss or a tensor, and the inputs of a step.
    """

    name: str
    family: str
    library: str
    build: Builder


def entries(family: str, library: str, builders: Mapping[str, Builder]) -> tuple[Entry, ...]:
    """Entries of one family and one library, by name."""
    return tuple(Entry(name, family, library, build) for name, build in builders.items())


class WithLoss(nn.Module):
    """A model with its loss: the mean of squares of its output, unless that is a scalar.

    Args:
        inner: Called with the inputs, by `names` if these are given, and with `fixed`.
        field: If the output is no tensor, the attribute's name or the position of the tensor in the output.
    """

    def __init__(
        self, inner: nn.Module, names: Sequence[str] = (), field: str | int | None = None, **fixed: Any
    ) -> None:
        super().__init__()
        self.inner, self.names, self.field, self.fixed = inner, tuple(names), field, fixed

    def forward(self, *inputs: Any) -> Tensor:
        """The loss."""
        if self.names:
            output = self.inner(**dict(zip(self.names, inputs, strict=True)), **self.fixed)
        else:
            output = self.inner(*inputs, **self.fixed)
        if isinstance(self.field, str):
            output = getattr(output, self.field)
        elif self.field is not None:
            output = output[self.field]
        loss: Tensor = output
        return loss if loss.ndim == 0 else loss.float().square().mean()


def images(batch: int, size: int, channels: int = 3) -> Tensor:
    """Float [B, C, S, S]."""
    return torch.randn(batch, channels, size, size)


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Int64 [B, T] without the lowest ids, which stand for padding and the like."""
    return torch.randint(4, vocabulary, (batch, length))
