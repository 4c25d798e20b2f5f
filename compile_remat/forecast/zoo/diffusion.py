"""A U-Net that removes noise from latent images, conditioned on text: ResNet blocks, and attention to a text's embedding."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = 32
"""Number of groups of each group normalisation."""

Built = tuple[nn.Module, tuple[Tensor, Tensor, Tensor, Tensor]]


def sd_unet(batch: int = 8) -> Built:
    """The U-Net of Stable Diffusion 1.5 at 512 pixels: latents of 64, 77 text tokens of 768 (Rombach and others, 2022)."""
    latents = torch.zeros(batch, 4, 64, 64)
    times = torch.zeros(batch, dtype=torch.int64)
    return DiffusionUNet(), (latents, times, torch.zeros(batch, 77, 768), torch.zeros_like(latents))


class DiffusionUNet(nn.Module):
    """Levels down and up with two and three blocks each, skip connections, and the loss inside.

    Every level but the lowest has attention after each of its blocks.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (320, 640, 1280, 1280),
        context: int = 768,
        channels: int = 4,
        heads: int = 8,
        blocks: int = 2,
    ) -> None:
        super().__init__()
        first, last, embedding = widths[0], widths[-1], 4 * widths[0]
        self.embedding = nn.Sequential(nn.Linear(first, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.stem = nn.Conv2d(channels, first, 3, padding=1)
        across = [first]
        down = []
        for k, (before, width) in enumerate(pairwise((first, *widths))):
            is_lowest = k == len(widths) - 1
            inputs = [before, *[width] * (blocks - 1)]
            resize: nn.Module = nn.Identity() if is_lowest else nn.Conv2d(width, width, 3, 2, 1)
            down.append(Level(inputs, width, embedding, context, 0 if is_lowest else heads, resize))
            across += [width] * (blocks + (not is_lowest))
        self.down = nn.ModuleList(down)
        self.middle = nn.ModuleList([Residual(last, last, embedding), Residual(last, last, embedding)])
        self.middle_attention = Attended(last, context, heads)
        up, before = [], last
        for k, width in enumerate(reversed(widths)):
            is_highest = k == len(widths) - 1
            inputs = [a + across.pop() for a in (before, *[width] * blocks)]
            resize = nn.Identity() if is_highest else Raise(width)
            up.append(Level(inputs, width, embedding, context, heads if k else 0, resize))
            before = width
        self.up = nn.ModuleList(up)
        self.norm = nn.GroupNorm(GROUPS, first)
        self.head = nn.Conv2d(first, channels, 3, padding=1)

    def forward(self, latents: Tensor, times: Tensor, context: Tensor, noise: Tensor) -> Tensor:
        """[B, C, H, W], steps of the noise [B], [B, T, D], [B, C, H, W] -> scalar loss"""
        embedding = F.silu(self.embedding(waves(times, self.stem.out_channels).to(latents.dtype)))
        x = self.stem(latents)
        across = [x]
        for k, level in enumerate(self.down):
            found, x = level(x, embedding, context, None)
            across += [*found, x] if k < len(self.down) - 1 else found
        x = self.middle[0](x, embedding)
        x = self.middle[1](self.middle_attention(x, context), embedding)
        for level in self.up:
            _, x = level(x, embedding, context, across)
        return F.mse_loss(self.head(F.silu(self.norm(x))).float(), noise.float())


class Level(nn.Module):
    """Blocks of one resolution, each followed by attention if `heads` is not 0, and a module that resizes to the next one."""

    def __init__(
        self, inputs: list[int], width: int, embedding: int, context: int, heads: int, resize: nn.Module
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(channels, width, embedding) for channels in inputs)
        self.attentions = nn.ModuleList(Attended(width, context, heads) for _ in inputs if heads)
        self.resize = resize

    def forward(
        self, x: Tensor, embedding: Tensor, context: Tensor, across: list[Tensor] | None
    ) -> tuple[list[Tensor], Tensor]:
        """Returns each block's output, and the last one resized; each block also reads the last of `across`, if given."""
        found = []
        for k, block in enumerate(self.blocks):
            x = block(x if across is None else torch.cat([x, across.pop()], dim=1), embedding)
            if len(self.attentions):
                x = self.attentions[k](x, context)
            found.append(x)
        return found, self.resize(x)


class Residual(nn.Module):
    """Two convolutions, each after a group normalisation, with the time's embedding added between them; beside a shortcut."""

    def __init__(self, channels: int, outer: int, embedding: int) -> None:
        super().__init__()
        self.norm_a, self.a = nn.GroupNorm(GROUPS, channels), nn.Conv2d(channels, outer, 3, padding=1)
        self.time = nn.Linear(embedding, outer)
        self.norm_b, self.b = nn.GroupNorm(GROUPS, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.shortcut = nn.Identity() if channels == outer else nn.Conv2d(channels, outer, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """[B, C, H, W], [B, E] -> [B, outer, H, W]"""
        y = self.a(F.silu(self.norm_a(x))) + self.time(embedding)[:, :, None, None]
        return self.shortcut(x) + self.b(F.silu(self.norm_b(y)))  # type: ignore[no-any-return]


class Attended(nn.Module):
    """Self-attention of pixels, attention to the context, and a gated MLP; beside a shortcut."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.to_pixels, self.to_context = Attention(width, width, heads), Attention(width, context, heads)
        self.gated, self.back = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """[B, C, H, W], [B, T, D] -> [B, C, H, W]"""
        y = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        z = self.norms[0](y)
        y = y + self.to_pixels(z, z)
        y = y + self.to_context(self.norms[1](y), context)
        value, gate = self.gated(self.norms[2](y)).chunk(2, dim=-1)
        y = y + self.back(value * F.gelu(gate))
        return x + self.leave(y.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head attention: queries from one sequence, keys and values from another."""

    def __init__(self, width: int, read: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.key, self.value = nn.Linear(read, width, bias=False), nn.Linear(read, width, bias=False)

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        """[B, T, C], [B, S, D] -> [B, T, C]"""
        given = (self.query(x), self.key(read), self.value(read))
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in given)
        found: Tensor = self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return found


class Raise(nn.Module):
    """Nearest upsampling by 2 in both dimensions, then a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, 2 * H, 2 * W]"""
        found: Tensor = self.convolution(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return found


def waves(times: Tensor, width: int) -> Tensor:
    """Cosines and sines of the times at frequencies from 1 down to 1 / 10,000: [B] -> [B, width], float32."""
    steps = torch.arange(width // 2, dtype=torch.float32, device=times.device)
    angles = times[:, None].float() * torch.exp(-math.log(10_000) / (width // 2) * steps)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
