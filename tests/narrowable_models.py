"""Models whose plans save values in narrow forms: masks as bits at 0.6 of plain's peak, indices as bytes at `min`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH = 256, 96


class Dropouts(nn.Module):
    """Layers whose masks are all that a budget cannot do without."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1, self.training)
        return x.square().mean()


class Maxima(nn.Module):
    """Layers that take the maximum over time, and leave its indices to the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).view(-1, 2, WIDTH).max(1).values.repeat(2, 1)
        return x.square().mean()


def batch(width: int = WIDTH, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
