"""Residual convolutional networks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.building import Built, scaled


class Residual(nn.Module):
    """Basic ResNet block: two 3x3 convolutions with BatchNorm, projected when it changes shape."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.c2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.b1, self.b2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.project = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H/stride, W/stride]"""
        y = F.relu(self.b1(self.c1(x)))
        shortcut: Tensor = self.project(x)
        return F.relu(self.b2(self.c2(y)) + shortcut)


def resnet(scale: float) -> Built:
    """residual network of 6 basic blocks, BatchNorm in training mode"""
    width, batch, size = scaled(24, scale, step=8, least=8), scaled(32, scale, least=4), scaled(64, scale, least=16)
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1)]
    for stage, stride in enumerate((1, 2, 2)):
        channels = width << stage
        blocks += [
            Residual(channels if stride == 1 else channels // 2, channels, stride),
            Residual(channels, channels, 1),
        ]
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 2, 10)]
    return nn.Sequential(*blocks), (torch.randn(batch, 3, size, size),)
