"""Models for code generation alone, at the sizes of a GPU: one or two blocks of each kind, activations far above the weights.

The emitted code depends on a block's structure, not on how often it stands there.  Large matrix products have dimensions that
8 divides: others Inductor pads by what it measures on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.models import Case
from benchmarks.models.building import Built, converted, converted_tensor
from benchmarks.models.heldout import ConvNextBlock, Experts, Llama, VisionTransformer
from benchmarks.models.large import LanguageModel, ResNet
from benchmarks.models.transformers import Block
from compile_remat.forecast.zoo.vision import UNet

VOCABULARY = 8192


def gpt() -> Built:
    """GPT of 2 blocks (d=1024, 8 heads), 8 x 1024 tokens, vocabulary 8192, tied head, loss inside"""
    blocks = [Block(1024, 8, causal=True) for _ in range(2)]
    return LanguageModel(blocks, nn.LayerNorm(1024), VOCABULARY, 1024, positions=1024), _tokens(8, 1024)


def llama() -> Built:
    """Llama of 2 blocks (d=1024, 8 heads in 2 groups), 4 x 2048 tokens, vocabulary 8192, loss inside"""
    return Llama(2, 1024, 2048, VOCABULARY), _tokens(4, 2048)


def bert() -> Built:
    """encoder of 2 blocks (d=1024, 16 heads), 16 x 512 tokens, vocabulary 8192, dropout 0.1, loss inside"""
    blocks = [Block(1024, 16, causal=False, dropout=0.1) for _ in range(2)]
    return LanguageModel(blocks, nn.LayerNorm(1024), VOCABULARY, 1024, positions=512), _tokens(16, 512)


def vit() -> Built:
    """vision transformer of 2 blocks (d=512, 4 heads), 64 x 257 tokens, dropout 0.1, loss inside"""
    return VisionTransformer(2, 512, 128, 8), (torch.randn(64, 3, 128, 128), torch.randint(100, (64,)))


def experts() -> Built:
    """2 blocks (d=512, 4 heads) with a dense mixture of 4 experts each, 16 x 512 tokens"""
    return nn.Sequential(*[Experts(512, 4, 4) for _ in range(2)]), (torch.randn(16, 512, 512),)


def resnet() -> Built:
    """ResNet of 4 bottlenecks, 64 x 3 x 224 x 224, channels last, BatchNorm, loss inside"""
    return ResNet(64, (1, 1, 1, 1), 1000), (torch.randn(64, 3, 224, 224), torch.randint(1000, (64,)))


def convnext() -> Built:
    """ConvNeXt of 4 blocks at two resolutions, 32 x 3 x 128 x 128"""
    blocks: list[nn.Module] = [nn.Conv2d(3, 96, 2, 2), *[ConvNextBlock(96) for _ in range(2)]]
    blocks += [nn.Conv2d(96, 192, 2, 2), *[ConvNextBlock(192) for _ in range(2)]]
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 8)]
    return nn.Sequential(*blocks), (torch.randn(32, 3, 128, 128),)


def unet() -> Built:
    """U-Net of 5 resolutions, 4 x 3 x 256 x 256, BatchNorm, skips by concatenation, loss inside"""
    return UNet(), (torch.randn(4, 3, 256, 256), torch.randint(2, (4, 256, 256)))


def _tokens(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (2, batch, tokens))
    return ids[0], ids[1]


CASES: dict[str, Callable[[], Built]] = {
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "experts": experts,
    "resnet": resnet,
    "convnext": convnext,
    "unet": unet,
}
TRANSFORMERS = ("gpt", "llama", "bert", "vit", "experts")
CHANNELS_LAST = ("resnet",)


def build(name: str, dtype: torch.dtype) -> Case:
    """The named case; its floating-point tensors have `dtype`.  Works under a ``FakeTensorMode``."""
    module, inputs = CASES[name]()
    keep = torch.channels_last if name in CHANNELS_LAST else torch.preserve_format
    converted(module, dtype, keep)
    moved = tuple(converted_tensor(value, dtype, keep) for value in inputs)
    return Case(name, module.train(), moved, (CASES[name].__doc__ or "").strip())
