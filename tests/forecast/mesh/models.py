"""Builders for the tests of forecasts over a mesh, which apply tensor parallelism themselves where they get one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks.models import WIDTH, Block, Stack

WIDE = 2 * WIDTH
"""So that shards of parameters are far larger than what else a step holds."""


class Net(nn.Module):
    """A stack between an embedding and a head, which belong to no block; the loss inside."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.enter, self.head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), tokens)


class Head(nn.Module):
    """The last layer and the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 96)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), tokens)


class Sections(nn.Module):
    """The same net in modules that can be compiled one by one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Embedding(96, width), Head(width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = block(x)
        return self.leave(x, tokens)


def sections(batch: int = 512, width: int = WIDE) -> tuple[nn.Module, tuple[Tensor]]:
    return Sections(width), (torch.zeros(batch, dtype=torch.int64),)


def spread(model: Any, mesh: Any) -> None:
    """Tensor parallelism as is usual: up by columns, down by rows."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def stack(batch: int = 512, width: int = WIDE, mesh: Any = None) -> tuple[nn.Module, tuple[Tensor]]:
    model = Stack(width=width)
    if mesh is not None and mesh["tp"].size() > 1:
        spread(model, mesh)
    return model, (torch.randn(batch, width),)


def net(batch: int = 64) -> tuple[nn.Module, tuple[Tensor]]:
    return Net(), (torch.zeros(batch, dtype=torch.int64),)
