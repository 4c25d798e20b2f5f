"""Models at the sizes of one large GPU, in bfloat16: tens of GiB by default, tenths of a second a step.

All carry their own loss, and hold their repeated parts in `blocks`, which is what `checkpointed` wraps. Weights are drawn on
the device itself: equal there from one call to the next, but not on another kind of device.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.models import Case
from benchmarks.models.building import Built, converted, converted_tensor, scaled
from benchmarks.models.heldout import LlamaBlock, RMSNorm
from benchmarks.models.transformers import Block

DTYPE = torch.bfloat16


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head and the loss.

    Args:
        positions: Learned position embeddings, as many as tokens; 0 for none.
        tables: Handed to every block beside its input: the cosines and sines of rotary positions.
        is_tied: True if the head shares the embedding's weight.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        vocabulary: int,
        width: int,
        *,
        positions: int = 0,
        tables: tuple[Tensor, ...] = (),
        is_tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.position = nn.Parameter(torch.randn(positions, width) * 0.02) if positions else None
        self.blocks, self.norm = nn.ModuleList(blocks), norm
        self.head = nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.num_tables = len(tables)
        for k, table in enumerate(tables):
            self.register_buffer(f"table{k}", table)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[B, T], [B, T] -> scalar loss"""
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position
        tables = [getattr(self, f"table{k}") for k in range(self.num_tables)]
        for block in self.blocks:
            x = block(x, *tables)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _tokens(vocabulary: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocabulary, (2, batch, tokens))
    return ids[0], ids[1]


def gpt(scale: float) -> Built:
    """GPT of 16 blocks (d=2048, 16 heads), 16 x 2048 tokens, vocabulary 50304, tied head"""
    depth, width = scaled(16, scale, least=3), scaled(2048, scale, step=128, least=128)
    batch, tokens, vocabulary = scaled(16, scale, least=4), scaled(2048, scale, step=64), scaled(50304, scale**2)
    blocks = [Block(width, width // 128, causal=True) for _ in range(depth)]
    return LanguageModel(blocks, nn.LayerNorm(width), vocabulary, width, positions=tokens), _tokens(
        vocabulary, batch, tokens
    )


def gpt_head(scale: float) -> Built:
    """The head of `gpt` behind a single block, 16 x 2048 tokens: embedding, block, norm, tied head and loss"""
    model, inputs = gpt(scale)
    assert isinstance(model, LanguageModel)
    model.blocks = model.blocks[:1]
    return model, inputs


def llama(scale: float) -> Built:
    """Llama of 16 blocks (d=2048, 16 heads in 4 groups), 8 x 4096 tokens, vocabulary 32000"""
    depth, width = scaled(16, scale, least=3), scaled(2048, scale, step=128, least=128)
    batch, tokens, vocabulary = scaled(8, scale, least=4), scaled(4096, scale, step=64), scaled(32000, scale**2)
    head = min(128, width // 4)
    heads = width // head
    angles = torch.outer(torch.arange(tokens).float(), 10000.0 ** (-torch.arange(head // 2) / (head // 2)))
    tables = angles.repeat(1, 2).cos(), angles.repeat(1, 2).sin()
    blocks = [LlamaBlock(width, heads, max(1, heads // 4)) for _ in range(depth)]
    return LanguageModel(blocks, RMSNorm(width), vocabulary, width, tables=tables, is_tied=False), _tokens(
        vocabulary, batch, tokens
    )


def bert_large(scale: float) -> Built:
    """BERT-large's sizes: 24 blocks (d=1024, 16 heads), 64 x 512 tokens, vocabulary 30522, dropout 0.1 but in attention"""
    depth, width = scaled(24, scale, least=3), scaled(1024, scale, step=64, least=128)
    batch, tokens, vocabulary = scaled(64, scale, least=4), scaled(512, scale, least=128), scaled(30522, scale**2)
    blocks = [Block(width, width // 64, causal=False, dropout=0.1) for _ in range(depth)]
    return LanguageModel(blocks, nn.LayerNorm(width), vocabulary, width, positions=tokens), _tokens(
        vocabulary, batch, tokens
    )


class Bottleneck(nn.Module):
    """ResNet block of three convolutions with BatchNorm, the middle one 3x3 at a quarter of the channels."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        inner = channels // 4
        self.c1, self.b1 = nn.Conv2d(channels_in, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.c2, self.b2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.c3, self.b3 = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.project = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H/stride, W/stride]"""
        y = F.relu(self.b1(self.c1(x)))
        y = F.relu(self.b2(self.c2(y)))
        shortcut: Tensor = self.project(x)
        return F.relu(self.b3(self.c3(y)) + shortcut)


class ResNet(nn.Module):
    """Stem, stages of bottlenecks, head and loss."""

    def __init__(self, width: int, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        blocks, channels_in = [], width
        for stage, depth in enumerate(depths):
            channels = 4 * width << stage
            for k in range(depth):
                blocks.append(Bottleneck(channels_in, channels, 2 if stage and k == 0 else 1))
                channels_in = channels
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(channels_in, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """[B, 3, H, W], [B] -> scalar loss"""
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet50(scale: float) -> Built:
    """ResNet-50, 768 x 3 x 224 x 224, channels last, BatchNorm in training mode"""
    width, size = scaled(64, scale, step=8, least=16), scaled(224, scale, step=32, least=64)
    batch, classes = scaled(768, scale**2, least=2), scaled(1000, scale)
    depths = (3, 4, 6, 3) if scale == 1 else (1, 1)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    model = ResNet(width, depths, classes)
    converted(model, torch.float32, torch.channels_last)
    return model, (images, torch.randint(classes, (batch,)))


LARGE: dict[str, Callable[[float], Built]] = {
    "gpt": gpt,
    "llama": llama,
    "bert_large": bert_large,
    "resnet50": resnet50,
}

EMITTED = {**LARGE, "gpt_head": gpt_head}
"""The models whose code is emitted without a GPU."""


def build_large(
    name: str, *, device: torch.device | str, scale: float = 1.0, seed: int = 0, share: float = 1.0
) -> Case:
    """The named case on `device`, weights and floating-point inputs in bfloat16, drawn from `seed`; also of fake tensors.

    Args:
        share: Part of the batch; at least one sample remains.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        module, inputs = LARGE[name](scale)
    inputs = tuple(value[: max(1, int(share * len(value)))].clone() for value in inputs)
    converted(module, DTYPE)
    moved = tuple(converted_tensor(value, DTYPE) for value in inputs)
    return Case(name, module.train(), moved, (LARGE[name].__doc__ or "").strip())


class Checkpointed(nn.Module):
    """A block whose inside is computed again in the backward, by torch's own `checkpoint`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Any:
        return checkpoint(self.block, *inputs, use_reentrant=False)


def checkpointed(case: Case) -> Case:
    """The same case with every block under `torch.utils.checkpoint`; its module is changed in place."""
    module: Any = case.module
    module.blocks = nn.ModuleList(Checkpointed(block) for block in module.blocks)
    return replace(case, module=module)
