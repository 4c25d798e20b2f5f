"""Models with no narrow place, or with work that comes back: what is early stays needed late."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.building import Built, scaled
from benchmarks.models.transformers import Block


def convolution(channels_in: int, channels: int) -> nn.Sequential:
    """3x3 convolution, GroupNorm, SiLU."""
    return nn.Sequential(nn.Conv2d(channels_in, channels, 3, 1, 1), nn.GroupNorm(8, channels), nn.SiLU())


class UNet(nn.Module):
    """Four resolutions, two convolutions at each on the way down and up, skips by concatenation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width << k for k in range(4)]
        self.enter = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList(
            nn.Sequential(convolution(a, b), convolution(b, b)) for a, b in pairwise([width, *sizes])
        )
        self.up = nn.ModuleList(
            nn.Sequential(convolution(b + a, a), convolution(a, a)) for b, a in pairwise(sizes[::-1])
        )
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]"""
        x, skips = self.enter(x), []
        for k, block in enumerate(self.down):
            x = block(x if k == 0 else F.avg_pool2d(x, 2))
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return self.leave(x)


def unet(scale: float) -> Built:
    """U-Net of 4 resolutions, GroupNorm, skips by concatenation"""
    width, batch, size = (
        scaled(32, scale, step=8, least=8),
        scaled(8, scale, least=2),
        scaled(64, scale, step=16, least=16),
    )
    return UNet(width), (torch.randn(batch, 3, size, size),)


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, 3x3 convolution of all that came before in the block; the input is appended to."""

    def __init__(self, channels_in: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels_in), nn.Conv2d(channels_in, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C + G, H, W]"""
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], dim=1)


def densenet(scale: float) -> Built:
    """DenseNet of 3 blocks with 6 layers each, every layer concatenated"""
    growth, batch, size = (
        scaled(16, scale, step=4, least=4),
        scaled(16, scale, least=2),
        scaled(32, scale, step=8, least=16),
    )
    layers, channels = scaled(6, scale, least=2), 2 * growth
    blocks: list[nn.Module] = [nn.Conv2d(3, channels, 3, 1, 1)]
    for block in range(3):
        for _ in range(layers):
            blocks.append(DenseLayer(channels, growth))
            channels += growth
        if block < 2:
            blocks += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)), (
        torch.randn(batch, 3, size, size),
    )


class CrossBlock(nn.Module):
    """Decoder block: causal self-attention, attention to the encoder's output, MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.own, self.heads = Block(width, heads, causal=True), heads
        self.norm, self.q, self.kv = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """[B, T, D], [B, S, D] -> [B, T, D]"""
        b, t, d = x.shape
        q = self.q(self.norm(x)).view(b, t, self.heads, d // self.heads).transpose(1, 2)
        k, v = self.kv(memory).view(b, -1, 2, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return self.own(x)


class EncoderDecoder(nn.Module):
    """An encoder whose output every block of the decoder reads."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(width, heads, causal=False) for _ in range(depth))
        self.decoder = nn.ModuleList(CrossBlock(width, heads) for _ in range(depth))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """[B, S, D], [B, T, D] -> [B, T, D]"""
        for block in self.encoder:
            source = block(source)
        for block in self.decoder:
            target = block(target, source)
        return target


def encoder_decoder(scale: float) -> Built:
    """encoder of 6 blocks, decoder of 6 with cross-attention"""
    depth, width = scaled(6, scale, least=2), scaled(192, scale, step=64, least=64)
    batch, tokens = 8, scaled(128, scale, least=32)
    return EncoderDecoder(depth, width, 4), (torch.randn(batch, tokens, width), torch.randn(batch, tokens, width))


class TwoPasses(nn.Module):
    """The same blocks, twice over two inputs, compared at the end (as contrastive training does)."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width, heads, causal=False) for _ in range(depth)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[B, T, D], [B, T, D] -> scalar loss"""
        a, b = self.blocks(x).mean(1), self.blocks(y).mean(1)
        return F.cross_entropy(F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T, torch.arange(len(a), device=a.device))


def two_passes(scale: float) -> Built:
    """6 blocks run twice in one graph, contrastive loss"""
    depth, width = scaled(6, scale, least=2), scaled(192, scale, step=64, least=64)
    batch, tokens = scaled(12, scale, least=2), scaled(128, scale, least=32)
    return TwoPasses(depth, width, 4), (torch.randn(batch, tokens, width), torch.randn(batch, tokens, width))


class Recurrent(nn.Module):
    """A gated recurrent cell of plain operators, unrolled over time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates, self.update = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[T, B, D] -> [B, D]"""
        state = torch.zeros_like(x[0])
        for step in x.unbind(0):
            reset, keep = torch.sigmoid(self.gates(torch.cat([step, state], -1))).chunk(2, -1)
            candidate = torch.tanh(self.update(torch.cat([step, reset * state], -1)))
            state = keep * state + (1.0 - keep) * candidate
        return state


def recurrent(scale: float) -> Built:
    """gated recurrent cell unrolled over 48 steps"""
    steps, width, batch = (
        scaled(48, scale, least=6),
        scaled(192, scale, step=64, least=64),
        scaled(512, scale, least=64),
    )
    return Recurrent(width), (torch.randn(steps, batch, width),)


class SpectralBlock(nn.Module):
    """Mixes tokens and channels by a Fourier transform instead of attention, then an MLP (FNet)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = self.l1(x + torch.fft.fft2(x).real / x.shape[-1])
        return self.l2(x + self.f2(F.gelu(self.f1(x))))


def fourier(scale: float) -> Built:
    """8 blocks that mix by FFT, with MLPs"""
    depth, width = scaled(8, scale, least=2), scaled(192, scale, step=64, least=64)
    batch, tokens = 8, scaled(128, scale, least=32)
    return nn.Sequential(*[SpectralBlock(width) for _ in range(depth)]), (torch.randn(batch, tokens, width),)
