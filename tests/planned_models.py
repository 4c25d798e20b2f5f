"""Builders for the tests of planning without a device, named as ``tests.planned_models:...``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_remat.forecast.zoo.diffusion import DiffusionUNet


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


def llama_of_many_words(batch: int = 2, seq: int = 128) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Llama(vocabulary=8192), (_tokens(batch, seq), _tokens(batch, seq))


def llama_with_dropout(batch: int = 2, seq: int = 128) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Llama(dropout=0.1), (_tokens(batch, seq), _tokens(batch, seq))


class Experts(nn.Module):
    """A gated MLP of which each token takes the two best of `count`, as one grouped product for all of them."""

    def __init__(self, width: int, count: int, inner: int) -> None:
        super().__init__()
        self.count, self.router = count, nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.zeros(count, width, 2 * inner))
        self.down = nn.Parameter(torch.zeros(count, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, experts = self.router(rows).float().softmax(-1).topk(2)
        order = experts.flatten().argsort()
        sizes = F.one_hot(experts.flatten(), self.count).sum(0)
        ends = sizes.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows[order // 2], self.up, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(rows).index_add(0, order // 2, y).view_as(x)


class RoutedLayer(nn.Module):
    """Attention, then experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm, self.experts = Attention(2, width // 2), nn.RMSNorm(width), Experts(width, 4, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.experts(self.norm(x))


def experts(batch: int = 2, seq: int = 64) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(RoutedLayer(64), RoutedLayer(64)), torch.zeros(batch, seq, 64)


def diffusion(batch: int = 2) -> tuple[nn.Module, tuple[Tensor, ...]]:
    latents, context = torch.zeros(batch, 4, 16, 16), torch.zeros(batch, 7, 16)
    model = DiffusionUNet(widths=(32, 64), context=16, heads=2)
    return model, (latents, torch.zeros(batch, dtype=torch.int64), context, torch.zeros_like(latents))


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


def one_number(batch: int = 4) -> tuple[nn.Module, Tensor]:
    """So small that a device has room for more samples than a product can have."""
    return nn.Linear(1, 1, bias=False), torch.randn(batch, 1)


def wide_products(batch: int = 4096) -> tuple[nn.Module, Tensor]:
    return nn.Linear(2048, 2048), torch.zeros(batch, 2048)


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


class Softmaxes(nn.Module):
    """Attention by hand, which Inductor finds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(x.size(0), -1, 4, 16).transpose(1, 2) for part in self.inner(x).chunk(3, -1))
        y = torch.softmax(q @ k.transpose(-2, -1) / 4.0, -1) @ v
        return self.outer(y.transpose(1, 2).reshape(x.shape)).square().mean()  # type: ignore[no-any-return]


def softmaxes(batch: int = 4) -> tuple[nn.Module, tuple[Tensor]]:
    return Softmaxes(), (torch.randn(batch, 128, 64),)
