"""Models whose plans plain Inductor undoes: by joining kernels, or by moving a matmul to an addition far behind it.

Kept apart from `benchmarks.models.CASES`: no one trains these, each shows one thing.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.building import Built, scaled

WIDTH = 64


class Siblings(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, 4) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(torch.sin(x + k) @ weight).sum() for k, weight in enumerate(self.weights)]).sum()


class Positions(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.lower = nn.ModuleList([nn.Linear(WIDTH, WIDTH // 4) for _ in range(depth)])
        self.upper = nn.ModuleList([nn.Linear(WIDTH // 4, WIDTH) for _ in range(depth)])

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        for k, (block, lower, upper) in enumerate(zip(self.blocks, self.lower, self.upper, strict=True)):
            x = torch.tanh(block(x) + upper(lower(torch.sin(place * (k + 1)))))
        return x.square().mean()


class Heads(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(depth)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 8) for _ in range(depth)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.tanh(self.body(x))
        losses = [
            functional.cross_entropy(head(norm(x)), target) for norm, head in zip(self.norms, self.heads, strict=True)
        ]
        return torch.stack(losses).sum()


class Tied(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return functional.cross_entropy(x @ self.table.weight.T, tokens)


def siblings(scale: float) -> Built:
    """12 values of one input, a matmul each, recomputed just in time"""
    return Siblings(scaled(12, scale, least=4)), (torch.randn(4096, WIDTH),)


def positions(scale: float) -> Built:
    """6 blocks, each with its own frequency of one tensor of positions"""
    return Positions(scaled(6, scale, least=4)), (torch.randn(4096, WIDTH), torch.randn(4096, WIDTH))


def heads(scale: float) -> Built:
    """8 heads, each with its own normalisation of shared features"""
    return Heads(scaled(8, scale, least=4)), (torch.randn(4096, WIDTH), torch.randint(0, 8, (4096,)))


def tied(scale: float) -> Built:
    """Embedding and output share a weight: the first gradient of the backward is added to the last"""
    return Tied(scaled(3, scale, least=2)), (torch.randint(0, 512, (4096,)),)


CASES = {"siblings": siblings, "positions": positions, "heads": heads, "tied": tied}
