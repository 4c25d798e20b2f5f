"""A model small enough for Triton's interpreter: embedding, LayerNorm, GELU, dropout, cross entropy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RATE = 0.25
WIDTH, BLOCKS, VOCABULARY, BATCH, TOKENS = 32, 3, 48, 2, 16


class Block(nn.Module):
    """A residual MLP; its second half is dropped out by `drop`."""

    def __init__(self, drop: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if self.drop is None else self.drop(y))


class Toy(nn.Module):
    """Blocks with the loss inside."""

    def __init__(self, drop: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[B, T], [B, T] -> scalar loss"""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def drop(x: Tensor) -> Tensor:
    """Torch's own dropout."""
    return F.dropout(x, RATE)


def make(drop: Callable[[Tensor], Tensor] | None) -> tuple[Toy, tuple[Tensor, Tensor]]:
    """The toy with weights drawn from a fixed seed, and its inputs."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (2, BATCH, TOKENS))
    return Toy(drop), (ids[0], ids[1])
