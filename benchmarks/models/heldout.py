"""Models that the memory model was not fitted on: written and sized before it, and not looked at while it was made."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.building import Built, scaled
from benchmarks.models.transformers import Block


class RMSNorm(nn.Module):
    """Root mean square norm as Llama has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class LlamaBlock(nn.Module):
    """Rotary positions, grouped-query attention, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.n1, self.n2 = RMSNorm(width), RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * groups * self.head, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        hidden = width * 8 // 3 // 32 * 32
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[B, T, D], [T, D/H], [T, D/H] -> [B, T, D]"""
        b, t, d = x.shape
        y = self.n1(x)
        q = self.q(y).view(b, t, self.heads, self.head).transpose(1, 2)
        k, v = self.kv(y).view(b, t, 2, self.groups, self.head).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        k, v = (z.repeat_interleave(self.heads // self.groups, dim=1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.o(y)
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding, halves swapped."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class Llama(nn.Module):
    """Embedding, blocks, head and loss."""

    def __init__(self, depth: int, width: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, 8, 2) for _ in range(depth))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        half = width // 8 // 2
        angles = torch.outer(torch.arange(tokens).float(), 10000.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cosine", angles.cos().to(torch.get_default_dtype()))
        self.register_buffer("sine", angles.sin().to(torch.get_default_dtype()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[B, T], [B, T] -> scalar loss"""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def llama(scale: float) -> Built:
    """Llama of 8 blocks: RMSNorm, rotary positions, grouped queries, SwiGLU, the loss inside"""
    depth, width = scaled(8, scale, least=2), scaled(256, scale, step=64, least=64)
    batch, tokens, vocabulary = 8, scaled(128, scale, least=32), scaled(2048, scale)
    ids = torch.randint(vocabulary, (2, batch, tokens))
    return Llama(depth, width, tokens, vocabulary), (ids[0], ids[1])


class VisionTransformer(nn.Module):
    """Patches by a strided convolution, class token, blocks, head."""

    def __init__(self, depth: int, width: int, size: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first, self.position = (
            nn.Parameter(torch.randn(1, 1, width)),
            nn.Parameter(torch.randn((size // patch) ** 2 + 1, width)),
        )
        self.blocks = nn.Sequential(*[Block(width, 4, causal=False, dropout=0.1) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """[B, 3, H, W], [B] -> scalar loss"""
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.first.expand(len(y), -1, -1), y], dim=1) + self.position
        return F.cross_entropy(self.head(self.norm(self.blocks(y))[:, 0]), labels, label_smoothing=0.1)


def vit(scale: float) -> Built:
    """vision transformer of 10 blocks on 64 patches, dropout 0.1"""
    depth, width, batch = scaled(10, scale, least=2), scaled(192, scale, step=64, least=64), scaled(24, scale, least=2)
    return VisionTransformer(depth, width, 64, 8), (torch.randn(batch, 3, 64, 64), torch.randint(100, (batch,)))


class ConvNextBlock(nn.Module):
    """Depthwise 7x7 convolution, LayerNorm over channels, inverted bottleneck, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]"""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


def convnext(scale: float) -> Built:
    """ConvNeXt of 8 blocks at two resolutions"""
    width, batch, size = (
        scaled(48, scale, step=16, least=16),
        scaled(16, scale, least=2),
        scaled(32, scale, step=8, least=16),
    )
    depth = scaled(4, scale, least=1)
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 2, 2), *[ConvNextBlock(width) for _ in range(depth)]]
    blocks += [nn.Conv2d(width, 2 * width, 2, 2), *[ConvNextBlock(2 * width) for _ in range(depth)]]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)), (
        torch.randn(batch, 3, 2 * size, 2 * size),
    )


class Experts(nn.Module):
    """Pre-norm block whose MLP is four experts, mixed by a router over all of them (dense mixture)."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.attend, self.norm = Block(width, heads, causal=True), nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = self.attend(x)
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        for k, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            x = x + weights[..., k : k + 1] * down(F.relu(up(y)).square())
        return x


def experts(scale: float) -> Built:
    """4 blocks with a dense mixture of 4 experts each"""
    depth, width = scaled(4, scale, least=1), scaled(192, scale, step=64, least=64)
    batch, tokens = 8, scaled(128, scale, least=32)
    return nn.Sequential(*[Experts(width, 4, 4) for _ in range(depth)]), (torch.randn(batch, tokens, width),)


class Gated(nn.Module):
    """Dilated gated convolution over time with residual and skip (WaveNet)."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)
        self.residual, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, C, T] -> residual [B, C, T], skip [B, C, T]"""
        filtered, gate = self.conv(x).chunk(2, dim=1)
        y = torch.tanh(filtered) * torch.sigmoid(gate)
        return x + self.residual(y), self.skip(y)


class WaveNet(nn.Module):
    """Stack of gated convolutions whose skips are summed."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(1, width, 1), nn.Conv1d(width, 64, 1)
        self.blocks = nn.ModuleList(Gated(width, 1 << (k % 5)) for k in range(depth))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[B, 1, T], [B, T] -> scalar loss"""
        x = self.enter(x)
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return F.cross_entropy(self.leave(F.relu(total + x)), targets)


def wavenet(scale: float) -> Built:
    """10 dilated gated convolutions over time with summed skips"""
    depth, width = scaled(10, scale, least=3), scaled(48, scale, step=16, least=16)
    batch, length = scaled(8, scale, least=2), scaled(2048, scale, least=256)
    return WaveNet(depth, width), (torch.randn(batch, 1, length), torch.randint(64, (batch, length)))


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed ones up, BatchNorm, sampled code (VAE)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 4, 2, 1) for a, b in pairwise([3, *sizes]))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in sizes)
        self.mean, self.spread = nn.Conv2d(4 * width, width, 1), nn.Conv2d(4 * width, width, 1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 4, 2, 1) for a, b in pairwise([width, 2 * width, width, 3]))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> scalar loss"""
        y = x
        for conv, norm in zip(self.down, self.norms, strict=True):
            y = F.leaky_relu(norm(conv(y)), 0.2)
        mean, spread = self.mean(y), self.spread(y)
        y = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
        for k, conv in enumerate(self.up):
            y = conv(y) if k == len(self.up) - 1 else F.leaky_relu(conv(y), 0.2)
        return F.mse_loss(y, x) - 0.5 * (1 + spread - mean.square() - spread.exp()).mean()


def autoencoder(scale: float) -> Built:
    """variational autoencoder of strided and transposed convolutions"""
    width, batch, size = (
        scaled(32, scale, step=8, least=8),
        scaled(32, scale, least=4),
        scaled(64, scale, step=16, least=16),
    )
    return Autoencoder(width), (torch.randn(batch, 3, size, size),)
