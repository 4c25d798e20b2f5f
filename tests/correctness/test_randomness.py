"""Random numbers: the backward sees those that the forward drew, and they are those of plain torch.compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from tests.correctness.harness import Case, Observed, Wrap, check, train


class Dropped(nn.Module):
    """Layers with dropout; the derivative of each depends on its mask and on what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.sin(layer(x)), 0.3)
        return x


def dropout(wrap: Wrap) -> Observed:
    return train(Dropped(), [torch.randn(32, 8)], wrap)


CASES = [
    Case("dropout", dropout, reference="compiled"),
]


def test_random(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)
