"""Vision models: ViT by `transformers`, a ResNet and a U-Net in plain torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_remat.forecast.zoo.joining import Loss, transformers
from compile_remat.forecast.zoo.tensor_parallel import spread_over

Built = tuple[nn.Module, tuple[Tensor, Tensor]]


def vit_large(batch: int = 64, mesh: Any = None) -> Built:
    """ViT-L/16 at 224 pixels: 24 layers of width 1024, 16 heads (Dosovitskiy and others, 2020)."""
    with transformers() as package:
        config = package.ViTConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            image_size=224,
            patch_size=16,
            num_labels=1000,
            attn_implementation="sdpa",
        )
        model = package.ViTForImageClassification(config)
        spread_over(model, mesh, heads=16)
        return Loss(model, "pixel_values"), (torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64))


def resnet_50(batch: int = 128) -> Built:
    """ResNet-50 at 224 pixels (He and others, 2015), with the stride in the middle convolution."""
    return ResNet((3, 4, 6, 3)), (torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64))


def unet(batch: int = 16) -> Built:
    """U-Net at 512 pixels: five levels of 64 to 1024 channels, two classes (Ronneberger and others, 2015), padded."""
    return UNet(), (torch.zeros(batch, 3, 512, 512), torch.zeros(batch, 512, 512, dtype=torch.int64))


class Bottleneck(nn.Module):
    """Convolutions of kernel sizes 1, 3 and 1 beside a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.a = _convolution(channels, inner, 1)
        self.b = _convolution(inner, inner, 3, stride)
        self.c = _convolution(inner, outer, 1)
        has_shortcut = stride != 1 or channels != outer
        self.shortcut = _convolution(channels, outer, 1, stride) if has_shortcut else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 4 * inner, H / stride, W / stride]"""
        y = self.c(F.relu(self.b(F.relu(self.a(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of bottlenecks, with the loss inside."""

    def __init__(self, depths: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        self.stem = _convolution(3, 64, 7, 2)
        blocks, channels = [], 64
        for stage, depth in enumerate(depths):
            inner = 64 << stage
            for block in range(depth):
                blocks.append(Bottleneck(channels, inner, 2 if stage and not block else 1))
                channels = 4 * inner
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """[B, 3, H, W], [B] -> scalar loss"""
        x = F.max_pool2d(F.relu(self.stem(images)), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


class Double(nn.Sequential):
    """Two convolutions of kernel size 3, each with a batch normalisation and a ReLU."""

    def __init__(self, channels: int, outer: int) -> None:
        super().__init__(_convolution(channels, outer, 3), nn.ReLU(), _convolution(outer, outer, 3), nn.ReLU())


class UNet(nn.Module):
    """Levels down and up with skip connections, and the loss inside."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512, 1024), classes: int = 2) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList([Double(3, widths[0]), *(Double(a, b) for a, b in pairs)])
        self.raised = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.up = nn.ModuleList(Double(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """[B, 3, H, W], [B, H, W] -> scalar loss"""
        across: list[Tensor] = []
        x = images
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            across.append(x)
        across.pop()
        for raised, block in zip(self.raised, self.up, strict=True):
            x = block(torch.cat([across.pop(), raised(x)], dim=1))
        return F.cross_entropy(self.head(x).float(), labels)


def _convolution(channels: int, outer: int, size: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(channels, outer, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outer))
