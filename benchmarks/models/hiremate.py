"""Networks of Rockmate and HiRemate (Zhao and others, ICML 2023; Gusak and others, ICML 2025), at the sizes of their scripts.

Sizes are those of `models/__init__.py` in topal-team/rockmate.  The output is averaged, as their test of these networks does.
Each builder takes a batch, as `compile-remat plan benchmarks.models.hiremate:gpt2` wants it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.published import Built

Sizes = tuple[int, int, int]


class Mean(nn.Module):
    """A network and the mean of its output."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        """The network's inputs -> scalar"""
        output: Tensor = self.network(*inputs)
        return output.mean()


def gpt2(batch: int = 100) -> Built:
    """GPT-2 of 12 blocks (d=768), 20 tokens, dropout 0.1 in attention as well, tied head; attention without a mask, as theirs"""
    return Mean(Gpt2(12, 768, 12, 50257)), (torch.zeros(batch, 20, dtype=torch.long),)


def regnet32(batch: int = 23) -> Built:
    """RegNetX-32GF at 256 pixels (Radosavovic and others, 2020)."""
    return Mean(RegNetX((2, 7, 13, 1), (336, 672, 1344, 2520), 168)), (torch.zeros(batch, 3, 256, 256),)


def uno(batch: int = 2) -> Built:
    """UNO for Navier-Stokes in three dimensions, from 10 steps to 40 (Rahman and others, 2022)."""
    return Mean(Uno()), (torch.zeros(batch, 64, 64, 10, 1),)


def ufno(batch: int = 3) -> Built:
    """U-FNO on 96 x 200 x 24 points of 12 channels (Wen and others, 2022), width 36, 10 modes."""
    return Mean(UFno(36, (10, 10, 10))), (torch.zeros(batch, 96, 200, 24, 12),)


# -- GPT-2 --------------------------------------------------------------------------------------------------------------


class Gpt2Block(nn.Module):
    """Attention whose probabilities are tensors, and an MLP, each behind a normalisation."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]"""
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2)
        )
        weights = F.dropout((q @ k.transpose(2, 3)).softmax(3), self.dropout, self.training)
        x = x + self.back((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Gpt2(nn.Module):
    """Embeddings, blocks, normalisation and the tied head."""

    def __init__(self, depth: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(2048, width)
        self.blocks = nn.ModuleList(Gpt2Block(width, heads) for _ in range(depth))
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, vocabulary]"""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embed(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = F.linear(self.norm(x), self.embed.weight)
        return logits


# -- RegNet -------------------------------------------------------------------------------------------------------------


class RegNetBlock(nn.Module):
    """Convolutions of 1, 3 (in groups) and 1 pixels of one width, beside a shortcut."""

    def __init__(self, channels: int, outer: int, group: int, stride: int) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Conv2d(channels, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.b = nn.Conv2d(outer, outer, 3, stride, 1, groups=outer // group, bias=False)
        self.c, self.norm_c = nn.Conv2d(outer, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.norm_b = nn.BatchNorm2d(outer)
        same = stride == 1 and channels == outer
        project = nn.Sequential(nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.shortcut = nn.Identity() if same else project

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H / stride, W / stride]"""
        y = F.relu(self.norm_a(self.a(x)), inplace=True)
        y = F.relu(self.norm_b(self.b(y)), inplace=True)
        return F.relu(self.shortcut(x) + self.norm_c(self.c(y)), inplace=True)


class RegNetX(nn.Module):
    """A stem of 32 channels, stages that halve the sides, and the head."""

    def __init__(self, depths: Sequence[int], widths: Sequence[int], group: int) -> None:
        super().__init__()
        blocks, channels = [], 32
        for depth, width in zip(depths, widths, strict=True):
            for k in range(depth):
                blocks.append(RegNetBlock(channels, width, group, 1 if k else 2))
                channels = width
        self.stem, self.norm = nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 1000]"""
        x = self.blocks(F.relu(self.norm(self.stem(images)), inplace=True))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


# -- Fourier operators --------------------------------------------------------------------------------------------------


class Spectral(nn.Module):
    """A product with the lowest modes of the Fourier transform, written into zeros corner by corner."""

    def __init__(self, channels: int, outer: int, modes: Sizes) -> None:
        super().__init__()
        self.outer, self.modes = outer, modes
        shape = (channels, outer, *modes)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=torch.cfloat)) for _ in range(4))

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """[B, C, X, Y, Z] -> [B, outer, *sizes]"""
        found = torch.fft.rfftn(x, dim=(-3, -2, -1))
        shape = (x.shape[0], self.outer, sizes[0], sizes[1], sizes[2] // 2 + 1)
        out = torch.zeros(shape, dtype=torch.cfloat, device=x.device)
        for weight, (rows, columns) in zip(self.weights, corners(self.modes[:2]), strict=True):
            place = (slice(None), slice(None), rows, columns, slice(self.modes[2]))
            out[place] = torch.einsum("bixyz,ioxyz->boxyz", found[place], weight)
        y: Tensor = torch.fft.irfftn(out, s=sizes, dim=(-3, -2, -1))
        return y


def corners(modes: Sequence[int]) -> list[tuple[slice, slice]]:
    """The lowest and the highest of two dimensions, in all four ways."""
    (rows, last_rows), (columns, last_columns) = ((slice(m), slice(-m, None)) for m in modes)
    return [(rows, columns), (last_rows, columns), (rows, last_columns), (last_rows, last_columns)]


class UnoBlock(nn.Module):
    """A spectral product beside a convolution of one point that is resampled, with a GELU behind."""

    def __init__(self, channels: int, outer: int, modes: Sizes, *, normalises: bool = False) -> None:
        super().__init__()
        self.spectral, self.point = Spectral(channels, outer, modes), nn.Conv3d(channels, outer, 1)
        self.norm = nn.InstanceNorm3d(outer, affine=True) if normalises else nn.Identity()

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """[B, C, X, Y, Z] -> [B, outer, *sizes]"""
        return F.gelu(self.norm(self.spectral(x, sizes) + self._resampled(self.point(x), sizes)))

    def _resampled(self, x: Tensor, sizes: Sizes) -> Tensor:
        found = torch.fft.rfftn(x, dim=(-3, -2, -1))
        kept = torch.zeros_like(found)
        for rows, columns in corners((sizes[0] // 2, sizes[1] // 2)):
            place = (slice(None), slice(None), rows, columns, slice(sizes[2] // 2))
            kept[place] = found[place]
        return resized(torch.fft.irfftn(kept, s=sizes, dim=(-3, -2, -1)), sizes)


class Uno(nn.Module):
    """Seven blocks down and up with connections across; width 8."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        w = width
        self.lift = nn.Sequential(nn.Linear(6, w // 2), nn.GELU(), nn.Linear(w // 2, w), nn.GELU())
        self.down0 = UnoBlock(w, 2 * w, (20, 20, 4), normalises=True)
        self.down1 = UnoBlock(2 * w, 4 * w, (14, 14, 4))
        self.down2 = UnoBlock(4 * w, 8 * w, (6, 6, 4))
        self.down3 = UnoBlock(8 * w, 16 * w, (6, 6, 7), normalises=True)
        self.up2 = UnoBlock(16 * w, 4 * w, (6, 6, 7))
        self.up1 = UnoBlock(8 * w, 2 * w, (14, 14, 10), normalises=True)
        self.up0 = UnoBlock(4 * w, 2 * w, (20, 20, 14))
        self.project = nn.Sequential(nn.Linear(3 * w, 4 * w), nn.GELU(), nn.Linear(4 * w, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, S, T, 1] -> [B, S, S, 4 T, 1]"""
        x = self.lift(torch.cat([x, grid(x)], -1)).permute(0, 4, 1, 2, 3)
        padding = int(0.2 * x.shape[-1])
        x = F.pad(x, (0, padding))
        rows, columns, times = x.shape[2:]
        x0 = self.down0(x, (3 * rows // 4, 3 * columns // 4, times))
        x1 = self.down1(x0, (rows // 2, columns // 2, times))
        y = self.down2(x1, (rows // 4, columns // 4, int(1.6 * times)))
        y = self.down3(y, (rows // 8, columns // 8, int(1.6 * times)))
        y = beside(self.up2(y, (rows // 2, columns // 2, int(2.4 * times))), x1)
        y = beside(self.up1(y, (3 * rows // 4, 3 * columns // 4, int(3.2 * times))), x0)
        y = beside(self.up0(y, (rows, columns, 4 * times)), x)[..., : -4 * padding]
        out: Tensor = self.project(y.permute(0, 2, 3, 4, 1))
        return out


def grid(x: Tensor) -> Tensor:
    """Five functions of the places, [B, X, Y, Z, 5]."""
    batch, *sizes = x.shape[:4]
    ends = (2 * math.pi, 2 * math.pi, 1.0)
    places = [torch.linspace(0, end, size, device=x.device) for end, size in zip(ends, sizes, strict=True)]
    a, b, c = (part.expand(batch, *sizes) for part in torch.meshgrid(*places, indexing="ij"))
    return torch.stack([a.sin(), b.sin(), a.cos(), b.cos(), c], -1)


def beside(x: Tensor, other: Tensor) -> Tensor:
    """`other` at the sizes of `x` behind its channels."""
    rows, columns, times = x.shape[2:]
    return torch.cat([x, resized(other, (rows, columns, times))], 1)


def resized(x: Tensor, sizes: Sizes) -> Tensor:
    return F.interpolate(x, size=sizes, mode="trilinear", align_corners=True)


class SmallUNet(nn.Module):
    """Three levels of one width; connections across."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(_unit(width, 2), *([_unit(width, 1)] if level else [])) for level in range(3)
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose3d(channels, width, 4, 2, 1), nn.LeakyReLU(0.1, inplace=True))
            for channels in (width, 2 * width, 2 * width)
        )
        self.head = nn.Conv3d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, X, Y, Z] -> [B, C, X, Y, Z]"""
        across = [x]
        for block in self.down:
            across.append(block(across[-1]))
        y = across.pop()
        for block in self.up:
            y = torch.cat([across.pop(), block(y)], 1)
        out: Tensor = self.head(y)
        return out


def _unit(width: int, stride: int) -> nn.Module:
    convolution = nn.Conv3d(width, width, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm3d(width), nn.LeakyReLU(0.1, inplace=True))


class UFno(nn.Module):
    """Three Fourier layers and three with a U-Net beside them."""

    def __init__(self, width: int, modes: Sizes) -> None:
        super().__init__()
        self.lift = nn.Linear(12, width)
        self.spectral = nn.ModuleList(Spectral(width, width, modes) for _ in range(6))
        self.point = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(6))
        self.unets = nn.ModuleList(SmallUNet(width) for _ in range(3))
        self.project = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, X, Y, Z, 12] -> [B, X, Y, Z]"""
        x = F.pad(F.pad(x, (0, 0, 0, 8, 0, 8), "replicate"), (0, 0, 0, 0, 0, 0, 0, 8))
        x = self.lift(x).permute(0, 4, 1, 2, 3)
        rows, columns, times = x.shape[2:]
        for k, (spectral, point) in enumerate(zip(self.spectral, self.point, strict=True)):
            y = spectral(x, (rows, columns, times)) + point(x.flatten(2)).view(x.shape)
            x = F.relu(y + self.unets[k - 3](x) if k >= 3 else y)
        out: Tensor = self.project(x.permute(0, 2, 3, 4, 1))
        return out[:, :-8, :-8, :-8, 0]
