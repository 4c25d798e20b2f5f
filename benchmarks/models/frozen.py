"""Models with inputs that plain torch.compile does not read again in its backward, and that programs do change before it.

Kept apart from `benchmarks.models.CASES`: only `benchmarks.inputs` plans for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.building import Built, scaled
from benchmarks.models.transformers import Block


class LowRank(nn.Module):
    """A frozen linear layer with a bias, and a trained correction of rank 8."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 8, bias=False)
        self.up = nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return self.base(x) + self.up(self.down(x))


def lora(scale: float) -> Built:
    """A frozen transformer with biases; every linear layer has a trained correction of rank 8"""
    depth, width, batch = scaled(8, scale, least=2), scaled(256, scale, step=64, least=64), scaled(8, scale)
    module = nn.Sequential(*(Block(width, max(1, width // 64), causal=True) for _ in range(depth)))
    module.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LowRank(child))
    return module, (torch.randn(batch, 256, width),)


class Distilled(nn.Module):
    """A student whose features follow those of a teacher inside of one graph."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
        self.student = nn.Sequential(*layers)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> []"""
        a = b = x
        loss = x.new_zeros(())
        for k in range(0, len(self.student), 2):
            a = self.student[k : k + 2](a)
            with torch.no_grad():
                b = self.teacher[k : k + 2](b)
            loss = loss + F.smooth_l1_loss(a, b, beta=0.1)
        return loss


def teacher(scale: float) -> Built:
    """4 linear layers that follow the features of an averaged copy of themselves"""
    depth, width, rows = scaled(4, scale, least=2), scaled(256, scale, step=64, least=64), scaled(4096, scale)
    return Distilled(width, depth), (torch.randn(rows, width),)


class FrozenBatchNorm(nn.Module):
    """Statistics and scales as buffers, as detection models have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.1), ("mean", 0.0), ("var", 1.0)):
            self.register_buffer(name, torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]"""
        scale = self.weight * (self.var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.mean * scale)[:, None, None]


class Bottom(nn.Module):
    """Two convolutions with frozen norms beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.n1 = nn.Conv2d(width, width, 3, 1, 1, bias=False), FrozenBatchNorm(width)
        self.second, self.n2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), FrozenBatchNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]"""
        y = F.relu(self.n1(self.first(x)))
        return F.relu(x + self.n2(self.second(y)))


def frozen_norms(scale: float) -> Built:
    """A convolutional network with frozen batch norms"""
    depth, width, batch = scaled(8, scale, least=2), scaled(64, scale, step=16, least=16), scaled(16, scale, least=2)
    blocks = [Bottom(width) for _ in range(depth)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), *blocks, *head), (torch.randn(batch, 3, 32, 32),)


class Stem(nn.Module):
    """Frozen layers before trained ones, and a loss of all outputs."""

    def __init__(self, width: int, frozen: int, trained: int) -> None:
        super().__init__()
        layers = [layer for _ in range(frozen + trained) for layer in (nn.Linear(width, width), nn.GELU())]
        self.layers = nn.Sequential(*layers)
        self.layers[: 2 * frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> []"""
        out = self.layers(x)
        return out.square().mean() + 0.3 * out.mean()


def frozen_stem(scale: float) -> Built:
    """2 frozen linear layers before 3 trained ones"""
    width, rows = scaled(256, scale, step=64, least=64), scaled(4096, scale)
    return Stem(width, 2, 3), (torch.randn(rows, width),)


FROZEN: dict[str, Callable[[float], Built]] = {
    "lora": lora,
    "teacher": teacher,
    "frozen norms": frozen_norms,
    "frozen stem": frozen_stem,
}
