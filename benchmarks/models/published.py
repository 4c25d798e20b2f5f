"""Networks of the literature on planning memory, rebuilt from their descriptions, with the output summed as their scripts do.

Each builder takes a batch and returns a module and its inputs, as `compile-remat plan benchmarks.models.published:vgg16` wants
them.  Convolutions that a normalisation follows have no bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, tuple[Tensor, ...]]


def resnet50(batch: int = 184) -> Built:
    """ResNet-50 at 224 pixels, the stride in the middle convolution (torchvision's)."""
    return ResNet(), (torch.zeros(batch, 3, 224, 224),)


def resnet101(batch: int = 64) -> Built:
    """ResNet-101 at 256 pixels."""
    return ResNet((3, 4, 23, 3)), (torch.zeros(batch, 3, 256, 256),)


def large_resnet50(batch: int = 16) -> Built:
    """ResNet-50 at 500 pixels: POFO's sizes."""
    return ResNet((3, 4, 6, 3)), (torch.zeros(batch, 3, 500, 500),)


def large_resnet101(batch: int = 16) -> Built:
    """ResNet-101 at 500 pixels."""
    return ResNet((3, 4, 23, 3)), (torch.zeros(batch, 3, 500, 500),)


def googlenet(batch: int = 320) -> Built:
    """GoogleNet at 224 pixels with normalisations, 3x3 in place of 5x5 (torchvision's), without the two side classifiers."""
    return GoogleNet(), (torch.zeros(batch, 3, 224, 224),)


def mobilenet_v2(batch: int = 272) -> Built:
    """MobileNetV2 at 224 pixels (Sandler and others, 2018)."""
    return MobileNetV2(), (torch.zeros(batch, 3, 224, 224),)


def vgg16(batch: int = 176) -> Built:
    """VGG-16 at 224 pixels without normalisations (Simonyan and Zisserman, 2014), with its two dropouts."""
    return Vgg((2, 2, 3, 3, 3)), (torch.zeros(batch, 3, 224, 224),)


def unet(batch: int = 11) -> Built:
    """U-Net at 416 x 608, one class; what goes up is pooled to the larger size, as in MONeT's copy of it."""
    return UNet(), (torch.zeros(batch, 3, 416, 608),)


# -- ResNet-50 ----------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels beside a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.a, self.b, self.c = _unit(channels, inner, 1), _unit(inner, inner, 3, stride), _bare(inner, outer, 1)
        self.shortcut = nn.Identity() if channels == outer else _bare(channels, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 4 * inner, H / stride, W / stride]"""
        return F.relu(self.c(self.b(self.a(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of bottlenecks; ResNet-50's have 3, 4, 6 and 3."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3)) -> None:
        super().__init__()
        blocks, channels = [], 64
        for stage, depth in enumerate(depths):
            for k in range(depth):
                blocks.append(Bottleneck(channels, 64 << stage, 2 if stage and not k else 1))
                channels = 256 << stage
        self.stem, self.blocks, self.head = _unit(3, 64, 7, 2), nn.ModuleList(blocks), nn.Linear(channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> sum of the logits"""
        x = F.max_pool2d(self.stem(images), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).sum()


# -- GoogleNet ----------------------------------------------------------------------------------------------------------

INCEPTIONS = (
    (192, 64, 96, 128, 16, 32, 32),
    (256, 128, 128, 192, 32, 96, 64),
    (480, 192, 96, 208, 16, 48, 64),
    (512, 160, 112, 224, 24, 64, 64),
    (512, 128, 128, 256, 24, 64, 64),
    (512, 112, 144, 288, 32, 64, 64),
    (528, 256, 160, 320, 32, 128, 128),
    (832, 256, 160, 320, 32, 128, 128),
    (832, 384, 192, 384, 48, 128, 128),
)
"""Channels of each inception (Szegedy and others, 2014, table 1): in, 1x1, 3x3 reduced, 3x3, 5x5 reduced, 5x5, pooled."""

POOLED_BEFORE = (2, 7)
"""Inceptions that follow a pooling."""


class Inception(nn.Module):
    """Four branches beside each other."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        n, one, reduced3, three, reduced5, five, pooled = channels
        self.one, self.pooled = _unit(n, one, 1), _unit(n, pooled, 1)
        self.three = nn.Sequential(_unit(n, reduced3, 1), _unit(reduced3, three, 3))
        self.five = nn.Sequential(_unit(n, reduced5, 1), _unit(reduced5, five, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H, W]"""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(F.max_pool2d(x, 3, 1, 1))], 1)


class GoogleNet(nn.Module):
    """Nine inceptions behind three convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.second = _unit(3, 64, 7, 2), nn.Sequential(_unit(64, 64, 1), _unit(64, 192, 3))
        self.blocks = nn.ModuleList(Inception(channels) for channels in INCEPTIONS)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(1024, 1000))

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> sum of the logits"""
        x = F.max_pool2d(self.stem(images), 3, 2, ceil_mode=True)
        x = F.max_pool2d(self.second(x), 3, 2, ceil_mode=True)
        for k, block in enumerate(self.blocks):
            if k in POOLED_BEFORE:
                x = F.max_pool2d(x, 3 if k == POOLED_BEFORE[0] else 2, 2, ceil_mode=True)
            x = block(x)
        return self.head(x.mean((2, 3))).sum()


# -- MobileNetV2 --------------------------------------------------------------------------------------------------------

INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, blocks and first stride of each stage (Sandler and others, 2018, table 2)."""


class Inverted(nn.Module):
    """Expanded, filtered by channel, reduced; added to the input where sizes allow."""

    def __init__(self, channels: int, outer: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels * expansion
        expanded = [] if expansion == 1 else [_unit(channels, inner, 1, act=nn.ReLU6(inplace=True))]
        depthwise = _unit(inner, inner, 3, stride, groups=inner, act=nn.ReLU6(inplace=True))
        self.layers, self.adds = (
            nn.Sequential(*expanded, depthwise, _bare(inner, outer, 1)),
            stride == 1 and channels == outer,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H / stride, W / stride]"""
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


class MobileNetV2(nn.Module):
    """Seventeen inverted bottlenecks."""

    def __init__(self) -> None:
        super().__init__()
        layers, channels = [_unit(3, 32, 3, 2, act=nn.ReLU6(inplace=True))], 32
        for expansion, outer, depth, stride in INVERTED:
            for k in range(depth):
                layers.append(Inverted(channels, outer, stride if not k else 1, expansion))
                channels = outer
        layers.append(_unit(channels, 1280, 1, act=nn.ReLU6(inplace=True)))
        self.layers, self.head = nn.Sequential(*layers), nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> sum of the logits"""
        return self.head(self.layers(images).mean((2, 3))).sum()


# -- VGG ----------------------------------------------------------------------------------------------------------------


class Vgg(nn.Module):
    """Stages of 3x3 convolutions with bias, each followed by a pooling, and three wide layers."""

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for depth, outer in zip(depths, (64, 128, 256, 512, 512), strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, outer, 3, padding=1), nn.ReLU(inplace=True)]
                channels = outer
            layers.append(nn.MaxPool2d(2))
        wide = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096)]
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), *wide, nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)
        )

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, 224, 224] -> sum of the logits"""
        return self.layers(images).sum()


# -- U-Net --------------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Levels of 64 to 512 channels down and up, with connections across; the lowest has 512 channels as well."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512, 512)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_double(a, b, b) for a, b in pairwise((3, *widths)))
        up = [(1024, 512, 256), (512, 256, 128), (256, 128, 64), (128, 64, 64)]
        self.up = nn.ModuleList(_double(*channels) for channels in up)
        self.head = nn.Conv2d(64, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> sum of the logits"""
        across: list[Tensor] = []
        x = images
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            across.append(x)
        across.pop()
        for block in self.up:
            beside = across.pop()
            x = block(torch.cat([beside, F.adaptive_avg_pool2d(x, beside.shape[2:])], dim=1))
        return self.head(x).sum()


def _double(channels: int, inner: int, outer: int) -> nn.Module:
    return nn.Sequential(_unit(channels, inner, 3), _unit(inner, outer, 3))


# -- parts --------------------------------------------------------------------------------------------------------------


def _bare(channels: int, outer: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution and its normalisation."""
    convolution = nn.Conv2d(channels, outer, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outer))


def _unit(
    channels: int, outer: int, size: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    """The same with what comes behind it, by default a ReLU, in place."""
    return _bare(channels, outer, size, stride, groups).append(act or nn.ReLU(inplace=True))
