"""Transformers and their relatives."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.building import Built, scaled


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
    depth, width = scaled(12, scale, least=2), scaled(256, scale, step=64, least=64)
    batch, tokens = 8, scaled(256, scale, least=128)
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
    depth, width = scaled(6, scale, least=2), scaled(256, scale, step=64, least=64)
    batch, tokens, vocabulary = 8, scaled(128, scale, least=32), scaled(4096, scale)
    ids = torch.randint(vocabulary, (2, batch, tokens))
    return Encoder(depth, width, tokens, vocabulary), (ids[0], ids[1])


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
    depth, width = scaled(10, scale, least=2), scaled(192, scale, step=64, least=64)
    batch, tokens = scaled(16, scale, least=4), scaled(128, scale, least=32)
    blocks = [GatedMixer(tokens, width) for _ in range(depth)]
    return nn.Sequential(*blocks), (torch.randn(batch, tokens, width),)
