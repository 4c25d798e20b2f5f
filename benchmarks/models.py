"""The models that the benchmarks train: builders that return a frozen `Case`.

Full sizes take 0.1 to 0.6 s a step on two CPU cores. `scale` in (0, 1] shrinks depth, width and batch for tests
(`--toy` is 0.1). A model whose output is a scalar carries its own loss; for the others the loss is `out.mean()`,
outside the compiled module.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOY_SCALE = 0.1


@dataclass(frozen=True)
class Case:
    """A module, the inputs of one training step, and what is special about it."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    note: str


def build(name: str, *, device: torch.device | str = "cpu", scale: float = 1.0, seed: int = 0) -> Case:
    """The named case with weights and inputs drawn from `seed`: two calls give equal numbers."""
    if name not in CASES:
        raise ValueError(f"no benchmark model {name!r}; there are: {', '.join(CASES)}")
    if not 0.0 < scale <= 1.0:
        raise ValueError(f"scale must lie in (0, 1], got {scale}")
    torch.manual_seed(seed)
    module, inputs = CASES[name](scale)
    return Case(name, module.to(device).train(), tuple(value.to(device) for value in inputs), note(name))


def note(name: str) -> str:
    """What is special about the named model: the docstring of its builder."""
    return (CASES[name].__doc__ or "").strip()


Built = tuple[nn.Module, tuple[Tensor, ...]]


def _scaled(full: int, scale: float, *, step: int = 1, least: int = 1) -> int:
    """`full * scale`, rounded down to a multiple of `step`, at least `least`."""
    return max(least, int(full * scale) // step * step)


def _linear(width: int, variance: float) -> nn.Linear:
    """A layer that keeps the size of what passes: torch's default shrinks gradients to denormal numbers in 100 layers,
    and those make a step 5 times slower."""
    layer = nn.Linear(width, width)
    nn.init.normal_(layer.weight, std=(variance / width) ** 0.5)
    return layer


def chain256(scale: float) -> Built:
    """100 x (Linear 256, ReLU), batch 2048"""
    depth, width, batch = _scaled(100, scale), 256, _scaled(2048, scale, least=512)
    layers = [layer for _ in range(depth) for layer in (_linear(width, 2.0), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(batch, width),)


def chain1024(scale: float) -> Built:
    """100 x Linear(1024), batch 32: the peak is gradients, no plan can lower it"""
    depth, width = _scaled(100, scale), _scaled(1024, scale, step=64, least=384)
    layers = [_linear(width, 1.0) for _ in range(depth)]
    return nn.Sequential(*layers), (torch.randn(32, width),)


class Block(nn.Module):
    """Pre-norm attention and MLP; `causal` for a GPT, dropout for an encoder."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        b, t, d = x.shape
        q, k, v = self.qkv(self.l1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, t, d)
        x = x + F.dropout(self.o(y), self.dropout, self.training)
        return x + F.dropout(self.f2(F.gelu(self.f1(self.l2(x)))), self.dropout, self.training)


def gpt(scale: float) -> Built:
    """GPT of 12 bare blocks (d=256, 4 heads, causal attention, MLP of 4d) on a float [8, 256, 256] input"""
    depth, width = _scaled(12, scale, least=2), _scaled(256, scale, step=64, least=64)
    batch, tokens = 8, _scaled(256, scale, least=128)
    blocks = [Block(width, 4, causal=True) for _ in range(depth)]
    return nn.Sequential(*blocks), (torch.randn(batch, tokens, width),)


class Encoder(nn.Module):
    """Masked-token training of an encoder: embedding, dropout, weight-tied head and loss inside."""

    def __init__(self, depth: int, width: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4, causal=False, dropout=0.1) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[B, T], [B, T] -> scalar loss"""
        x = F.dropout(self.token(tokens) + self.position, 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def bert(scale: float) -> Built:
    """encoder of 6 blocks with token embedding, dropout 0.1 and the loss inside"""
    depth, width = _scaled(6, scale, least=2), _scaled(256, scale, step=64, least=64)
    batch, tokens, vocabulary = 8, _scaled(128, scale, least=32), _scaled(4096, scale)
    ids = torch.randint(vocabulary, (2, batch, tokens))
    return Encoder(depth, width, tokens, vocabulary), (ids[0], ids[1])


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
    width, batch, size = _scaled(24, scale, step=8, least=8), _scaled(32, scale, least=4), _scaled(64, scale, least=16)
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1)]
    for stage, stride in enumerate((1, 2, 2)):
        channels = width << stage
        blocks += [
            Residual(channels if stride == 1 else channels // 2, channels, stride),
            Residual(channels, channels, 1),
        ]
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 2, 10)]
    return nn.Sequential(*blocks), (torch.randn(batch, 3, size, size),)


class GatedMixer(nn.Module):
    """MLP-mixer block whose channel half is a gated MLP (SwiGLU)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.l1, self.l2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.t1, self.t2 = nn.Linear(tokens, 2 * tokens), nn.Linear(2 * tokens, tokens)
        self.gate, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = x + self.t2(F.gelu(self.t1(self.l1(x).transpose(1, 2)))).transpose(1, 2)
        y = self.l2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x


def mixer(scale: float) -> Built:
    """MLP-mixer of 10 blocks with gated MLPs (SwiGLU)"""
    depth, width = _scaled(10, scale, least=2), _scaled(192, scale, step=64, least=64)
    batch, tokens = _scaled(16, scale, least=4), _scaled(128, scale, least=32)
    blocks = [GatedMixer(tokens, width) for _ in range(depth)]
    return nn.Sequential(*blocks), (torch.randn(batch, tokens, width),)


CASES: dict[str, Callable[[float], Built]] = {
    "gpt": gpt,
    "chain256": chain256,
    "chain1024": chain1024,
    "bert": bert,
    "resnet": resnet,
    "mixer": mixer,
}
TABLE_A = ("gpt", "chain256", "chain1024")
MAX_SPEED = ("chain256", "gpt", "bert", "resnet", "mixer")
