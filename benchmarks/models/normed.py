"""Convolutional models whose norms decide how far a rounding error travels: their widths and depths are parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """A block of a ResNet-50; of a smaller ResNet with `expansion` 1."""

    def __init__(self, width_in: int, width: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        out = width * expansion
        if expansion == 1:
            sizes = [(width_in, width, 3, stride), (width, width, 3, 1)]
        else:
            sizes = [(width_in, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c.out_channels) for c in self.convolutions)
        is_same = stride == 1 and width_in == out
        self.around = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(width_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for k, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            h = norm(convolution(h if k == 0 else h.relu()))
        out: Tensor = (h + self.around(x)).relu()
        return out


class ResNet(nn.Module):
    """Stages of blocks, each at half the resolution."""

    def __init__(self, width: int, depths: tuple[int, ...], expansion: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        blocks, width_in = [], width
        for stage, depth in enumerate(depths):
            for k in range(depth):
                blocks.append(Bottleneck(width_in, width << stage, 2 if k == 0 and stage else 1, expansion))
                width_in = (width << stage) * expansion
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width_in, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.blocks(self.norm(self.stem(x)).relu())
        return functional.cross_entropy(self.head(h.mean((2, 3))), labels)


class UNet(nn.Module):
    """Two levels, group norms and SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def layer(i: int, o: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(i, o, 3, 1, 1), nn.GroupNorm(4, o), nn.SiLU())

        self.down = nn.ModuleList([layer(3, width), layer(width, 2 * width), layer(2 * width, 4 * width)])
        self.up = nn.ModuleList([layer(6 * width, 2 * width), layer(3 * width, width)])
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](functional.avg_pool2d(first, 2))
        h = self.down[2](functional.avg_pool2d(second, 2))
        for layer, other in zip(self.up, (second, first), strict=True):
            h = layer(torch.cat([functional.interpolate(h, scale_factor=2.0), other], 1))
        return functional.cross_entropy(self.head(h).mean((2, 3)), labels)


class ConvNeXt(nn.Module):
    """Depthwise convolutions, layer norms and MLPs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, 7, 1, 3, groups=width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.stem(x)
        for convolution, norm, up, down in zip(self.depthwise, self.norms, self.ups, self.downs, strict=True):
            inner = down(functional.gelu(up(norm(convolution(h).permute(0, 2, 3, 1)))))
            h = h + inner.permute(0, 3, 1, 2)
        return functional.cross_entropy(self.head(h.mean((2, 3))), labels)


class Mobile(nn.Module):
    """Inverted bottlenecks with squeeze and excitation, as in EfficientNet."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        wide = 4 * width
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.expand = nn.ModuleList(nn.Conv2d(width, wide, 1, bias=False) for _ in range(depth))
        self.depthwise = nn.ModuleList(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False) for _ in range(depth))
        self.squeeze = nn.ModuleList(nn.Conv2d(wide, width // 2, 1) for _ in range(depth))
        self.excite = nn.ModuleList(nn.Conv2d(width // 2, wide, 1) for _ in range(depth))
        self.project = nn.ModuleList(nn.Conv2d(wide, width, 1, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for _ in range(depth) for c in (wide, wide, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.stem(x)
        for k, expand in enumerate(self.expand):
            wide = functional.silu(self.norms[3 * k](expand(h)))
            wide = functional.silu(self.norms[3 * k + 1](self.depthwise[k](wide)))
            gate = self.excite[k](functional.silu(self.squeeze[k](wide.mean((2, 3), keepdim=True))))
            h = h + self.norms[3 * k + 2](self.project[k](wide * gate.sigmoid()))
        return functional.cross_entropy(self.head(h.mean((2, 3))), labels)


Make = Callable[[], nn.Module]

FULL: dict[str, Make] = {
    "resnet": lambda: ResNet(64, (2, 2, 2, 2), 1),
    "resnet50": lambda: ResNet(64, (3, 4, 6, 3), 4),
    "unet": lambda: UNet(64),
    "convnext": lambda: ConvNeXt(128, 8),
    "mobile": lambda: Mobile(64, 8),
}
TOY: dict[str, Make] = {
    "resnet": lambda: ResNet(8, (1, 1, 1), 1),
    "resnet50": lambda: ResNet(8, (3, 4, 6, 3), 4),
    "unet": lambda: UNet(8),
    "convnext": lambda: ConvNeXt(16, 4),
    "mobile": lambda: Mobile(8, 3),
}
