"""Chains of linear layers."""

import torch
from torch import nn

from benchmarks.models.building import Built, scaled


def _linear(width: int, variance: float) -> nn.Linear:
    """A layer that keeps the size of what passes: torch's default shrinks gradients to denormal numbers in 100 layers,
    and those make a step 5 times slower."""
    layer = nn.Linear(width, width)
    nn.init.normal_(layer.weight, std=(variance / width) ** 0.5)
    return layer


def chain256(scale: float) -> Built:
    """100 x (Linear 256, ReLU), batch 2048"""
    depth, width, batch = scaled(100, scale), 256, scaled(2048, scale, least=512)
    layers = [layer for _ in range(depth) for layer in (_linear(width, 2.0), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(batch, width),)


def chain1024(scale: float) -> Built:
    """100 x Linear(1024), batch 32: the peak is gradients, no plan can lower it"""
    depth, width = scaled(100, scale), scaled(1024, scale, step=64, least=384)
    layers = [_linear(width, 1.0) for _ in range(depth)]
    return nn.Sequential(*layers), (torch.randn(32, width),)


def linear20(scale: float) -> Built:
    """20 x Linear(1024), batch 32"""
    depth, width = scaled(20, scale, least=2), scaled(1024, scale, step=64, least=384)
    return nn.Sequential(*(_linear(width, 1.0) for _ in range(depth))), (torch.randn(32, width),)


def relu1024(scale: float) -> Built:
    """100 x (Linear 1024, ReLU), batch 32"""
    depth, width = scaled(100, scale), scaled(1024, scale, step=64, least=384)
    layers = [layer for _ in range(depth) for layer in (_linear(width, 2.0), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(32, width),)
