"""Builders for the tests of planning without a device, named as ``tests.planned_models:...``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """A layer as Llama has it: normalised attention, causal, and a gated MLP."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Two such layers, the loss inside."""

    def __init__(self, width: int = 64, heads: int = 4, vocabulary: int = 256, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def llama(batch: int = 2, seq: int = 128) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Llama(), (_tokens(batch, seq), _tokens(batch, seq))


def llama_with_dropout(batch: int = 2, seq: int = 128) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Llama(dropout=0.1), (_tokens(batch, seq), _tokens(batch, seq))


class Attention(nn.Module):
    """Nothing but attention on one projection; `mask` adds a bias, which is trained or fixed."""

    def __init__(self, heads: int, size: int, *, mask: bool = False, trained: bool = True) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(heads * size, 3 * heads * size)
        self.bias = nn.Parameter(torch.zeros(1, 1, 1, 1), requires_grad=trained) if mask else None

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = None if self.bias is None else self.bias.expand(1, 1, t, t) * 1
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(b, t, d)


def attention(batch: int = 2, seq: int = 48) -> tuple[nn.Module, Tensor]:
    return Attention(2, 64), torch.zeros(batch, seq, 128)


def attention_of_odd_heads(batch: int = 2, seq: int = 48) -> tuple[nn.Module, Tensor]:
    return Attention(2, 60), torch.zeros(batch, seq, 120)


def attention_with_mask(batch: int = 2, seq: int = 40) -> tuple[nn.Module, Tensor]:
    return Attention(2, 64, mask=True), torch.zeros(batch, seq, 128)


def attention_with_fixed_mask(batch: int = 2, seq: int = 48) -> tuple[nn.Module, Tensor]:
    return Attention(2, 64, mask=True, trained=False), torch.zeros(batch, seq, 128)


def convolution(batch: int = 2) -> tuple[nn.Module, Tensor]:
    parts = [part for _ in range(2) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    return nn.Sequential(*parts), torch.zeros(batch, 4, 16, 16)


def depthwise(batch: int = 2) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(nn.Conv2d(4, 4, 3, groups=4) for _ in range(2))), torch.zeros(batch, 4, 16, 16)


class Broken(nn.Module):
    """Falls into two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        torch._dynamo.graph_break()
        return self.b(x)


def broken() -> tuple[nn.Module, Tensor]:
    return Broken(), torch.zeros(4, 8)


def frozen() -> tuple[nn.Module, Tensor]:
    return nn.Linear(8, 8).requires_grad_(False), torch.zeros(4, 8)


class Failing(nn.Module):
    """Cannot be called."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no such thing")


def failing() -> tuple[nn.Module, Tensor]:
    return Failing(), torch.zeros(4, 8)


def truncated() -> tuple[nn.Module, Tensor]:
    model = nn.Linear(8, 8)
    nn.init.trunc_normal_(model.weight)
    model.rate = torch.linspace(0, 1, 3)[1].item()  # type: ignore[assignment]
    return model, torch.zeros(4, 8)


def no_model() -> Any:
    return 3


def needs_batch(batch: int) -> tuple[nn.Module, Tensor]:
    return nn.Linear(8, 8), torch.zeros(batch, 8)


def _tokens(batch: int, seq: int) -> Tensor:
    return torch.zeros(batch, seq, dtype=torch.int64)
