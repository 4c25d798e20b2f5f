"""Six models on which the planner was not tuned: chosen and committed before, planned for only when a change was done.

Kept apart from `benchmarks.models.CASES`: only `benchmarks.gap` plans for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.building import Built, scaled


class Inception(nn.Module):
    """Four branches of different depth, concatenated; BatchNorm behind each convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        quarter = width // 4
        self.branches = nn.ModuleList(
            nn.Sequential(*[layer for k in range(depth) for layer in self.unit(width if k == 0 else quarter, quarter)])
            for depth in (1, 2, 3, 1)
        )

    @staticmethod
    def unit(channels_in: int, channels: int) -> list[nn.Module]:
        """Convolution, normalisation, activation."""
        return [nn.Conv2d(channels_in, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]"""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def inception(scale: float) -> Built:
    """8 blocks of four convolutional branches, concatenated"""
    depth, width, batch = scaled(8, scale, least=2), scaled(64, scale, step=16, least=16), scaled(16, scale, least=2)
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1), *[Inception(width) for _ in range(depth)]]
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*blocks), (torch.randn(batch, 3, 32, 32),)


class SqueezeExcite(nn.Module):
    """Inverted bottleneck with a depthwise convolution and channel gates (EfficientNet)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 4 * width
        self.up, self.n1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.depthwise, self.n2 = nn.Conv2d(inner, inner, 3, 1, 1, groups=inner, bias=False), nn.BatchNorm2d(inner)
        self.squeeze, self.excite = nn.Conv2d(inner, width // 4, 1), nn.Conv2d(width // 4, inner, 1)
        self.down, self.n3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]"""
        y = F.silu(self.n2(self.depthwise(F.silu(self.n1(self.up(x))))))
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return x + self.n3(self.down(y * gate))


def squeeze_excite(scale: float) -> Built:
    """8 inverted bottlenecks with channel gates"""
    depth, width, batch = scaled(8, scale, least=2), scaled(32, scale, step=8, least=8), scaled(16, scale, least=2)
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1), *[SqueezeExcite(width) for _ in range(depth)]]
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*blocks), (torch.randn(batch, 3, 64, 64),)


class CrossAttention(nn.Module):
    """Few latent vectors read many inputs, then each other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2, self.n3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, latents: Tensor, inputs: Tensor) -> Tensor:
        """[B, L, D], [B, T, D] -> [B, L, D]"""
        q, kv = self.q(self.n1(latents)), self.kv(self.n2(inputs))
        k, v = kv.chunk(2, dim=-1)
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (q, k, v))
        latents = latents + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return latents + self.f2(F.gelu(self.f1(self.n3(latents))))


class Perceiver(nn.Module):
    """The inputs are read by every second block, the latents by the others."""

    def __init__(self, depth: int, width: int, latents: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width))
        self.blocks = nn.ModuleList(CrossAttention(width, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, L, D]"""
        latents = self.latents.expand(len(x), -1, -1)
        for k, block in enumerate(self.blocks):
            latents = block(latents, latents if k % 2 else x)
        return latents


def perceiver(scale: float) -> Built:
    """8 blocks of latents that read many inputs and each other in turn"""
    depth, width = scaled(8, scale, least=2), scaled(192, scale, step=64, least=64)
    return Perceiver(depth, width, 64), (torch.randn(8, scaled(512, scale, least=64), width),)


class MessagePassing(nn.Module):
    """Messages along edges, summed at their targets, and a gated update (graph network)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.update, self.norm = nn.GRUCell(width, width), nn.LayerNorm(width)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """[N, D], [E], [E] -> [N, D]"""
        message = self.message(torch.cat([nodes[source], nodes[target]], dim=-1))
        total = torch.zeros_like(nodes).index_add(0, target, message)
        return self.norm(self.update(total, nodes))


class GraphNetwork(nn.Module):
    """Rounds of messages with weights of their own."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(MessagePassing(width) for _ in range(depth))

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """[N, D], [E], [E] -> [N, D]"""
        for one in self.rounds:
            nodes = one(nodes, source, target)
        return nodes


def graph_network(scale: float) -> Built:
    """8 rounds of messages along 8192 edges between 2048 nodes"""
    depth, width, count = scaled(8, scale, least=2), scaled(64, scale, step=16, least=16), scaled(2048, scale, least=64)
    edges = torch.randint(count, (2, 4 * count))
    return GraphNetwork(depth, width), (torch.randn(count, width), edges[0], edges[1])


class Windows(nn.Module):
    """Attention inside of windows that shift by half a window in every second block (Swin)."""

    def __init__(self, width: int, heads: int, window: int, *, is_shifted: bool) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, window // 2 if is_shifted else 0
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.zeros(heads, window * window, window * window))

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, D] -> [B, H, W, D]"""
        b, h, w, d = x.shape
        side = self.window
        y = torch.roll(self.n1(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // side, side, w // side, side, d).transpose(2, 3).reshape(-1, side * side, d)
        q, k, v = self.qkv(y).view(len(y), side * side, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5 + self.bias
        y = self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(len(y), side * side, d))
        y = y.view(b, h // side, w // side, side, side, d).transpose(2, 3).reshape(b, h, w, d)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.f2(F.gelu(self.f1(self.n2(x))))


def windows(scale: float) -> Built:
    """6 blocks of attention inside of shifted windows, the softmax written out"""
    depth, width, batch = scaled(6, scale, least=2), scaled(96, scale, step=32, least=32), scaled(8, scale, least=2)
    blocks = [Windows(width, 4, 4, is_shifted=k % 2 == 1) for k in range(depth)]
    return nn.Sequential(*blocks), (torch.randn(batch, 16, 16, width),)


class Recommender(nn.Module):
    """Embeddings of many features, crossed with themselves layer by layer, beside an MLP (DCN)."""

    def __init__(self, depth: int, features: int, vocabulary: int, width: int) -> None:
        super().__init__()
        size = features * width
        self.table = nn.Embedding(features * vocabulary, width)
        self.crosses = nn.ModuleList(nn.Linear(size, size) for _ in range(depth))
        self.deep = nn.Sequential(
            *[x for _ in range(depth) for x in (nn.Linear(size, size), nn.ReLU(), nn.Dropout(0.1))]
        )
        self.leave = nn.Linear(2 * size, 1)

    def forward(self, ids: Tensor, clicks: Tensor) -> Tensor:
        """[B, K], [B] -> scalar loss"""
        first = x = self.table(ids).flatten(1)
        for cross in self.crosses:
            x = first * cross(x) + x
        y = self.leave(torch.cat([x, self.deep(first)], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(y, clicks)


def recommender(scale: float) -> Built:
    """embeddings of 16 features, 6 cross layers beside an MLP of 6 layers"""
    depth, batch, vocabulary = scaled(6, scale, least=2), scaled(2048, scale, least=64), scaled(1000, scale, least=64)
    ids = torch.randint(vocabulary, (batch, 16)) + vocabulary * torch.arange(16)
    return Recommender(depth, 16, vocabulary, 16), (ids, torch.rand(batch).round())


UNSEEN: dict[str, Callable[[float], Built]] = {
    "inception": inception,
    "squeeze_excite": squeeze_excite,
    "perceiver": perceiver,
    "graph_network": graph_network,
    "windows": windows,
    "recommender": recommender,
}
