"""Operators with their own kernels or odd derivatives: convolution, norms, losses, indexing, Fourier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.correctness.harness import Case, Observed, Wrap, check, train


class Images(nn.Module):
    """Convolutions of three kinds, pooling with indices and back, interpolation, batch and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.up, self.point = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 4, 1)
        self.batch, self.group, self.instance = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.relu(self.batch(self.conv(x)))
        pooled, indices = F.max_pool2d(h, 2, return_indices=True)
        h = F.silu(self.group(self.grouped(pooled)))
        restored = F.max_unpool2d(h, indices, 2)
        up = self.point(self.instance(torch.sin(self.up(h))))
        small = F.interpolate(up, scale_factor=0.5, mode="bilinear", align_corners=False)
        large = F.interpolate(F.adaptive_avg_pool2d(small, 3), size=(5, 7), mode="nearest")
        return torch.exp(-up) * small.mean(), torch.sin(F.avg_pool2d(restored, 3)), F.pixel_shuffle(large, 2)


def images(wrap: Wrap) -> Observed:
    return train(Images(), [torch.randn(2, 3, 8, 8, requires_grad=True)], wrap, learning_rate=1e-3)


class Volumes(nn.Module):
    """Convolution and pooling in one and three dimensions, padding modes, and a grid that is sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.volume = nn.Conv1d(3, 4, 3, stride=2), nn.Conv3d(4, 3, 2)
        self.turn = nn.Parameter(torch.tensor([[1.0, 0.1, 0.2], [-0.1, 0.9, 0.1]]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        line = torch.sin(self.line(F.pad(x, (2, 1), mode="reflect")))
        volume = torch.sin(self.volume(line[:, :, None, None, :].expand(-1, -1, 3, 3, -1)))
        pooled = F.max_pool3d(F.pad(volume, (1, 1, 1, 1, 1, 1), mode="replicate"), 2)
        grid = F.affine_grid(self.turn.expand(x.shape[0], 2, 3), [x.shape[0], 3, 4, 4], align_corners=False)
        sampled = F.grid_sample(volume[:, :, 0], grid, align_corners=False)
        return torch.exp(pooled), torch.sin(sampled), F.max_pool1d(line, 2), F.unfold(sampled, 2)


def volumes(wrap: Wrap) -> Observed:
    return train(Volumes(), [torch.randn(2, 3, 9, requires_grad=True)], wrap)


class Losses(nn.Module):
    """Losses of which some positions do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(torch.sin(self.layer(x)))
        flat = logits.flatten(0, 1)
        labels = target.flatten().clamp(min=0)
        log_probabilities = F.log_softmax(logits, -1)
        lengths = torch.full((x.shape[1],), x.shape[0]), torch.full((x.shape[1],), 2)
        return (
            F.cross_entropy(flat, target.flatten(), ignore_index=-100, label_smoothing=0.1),
            F.nll_loss(log_probabilities.flatten(0, 1), labels, reduction="none"),
            F.ctc_loss(log_probabilities, labels.view(x.shape[0], -1).t()[:, :2] % 5 + 1, *lengths),
            F.binary_cross_entropy_with_logits(logits, torch.sigmoid(logits.detach() * 3)),
            F.huber_loss(flat, flat.flip(0).detach()) + F.kl_div(log_probabilities, log_probabilities.exp().roll(1, 0)),
            F.cosine_similarity(flat, flat.flip(0)).sum() + F.poisson_nll_loss(flat, labels[:, None]),
        )


def losses(wrap: Wrap) -> Observed:
    target = torch.randint(0, 6, (7, 3))
    target[2:4, 1] = -100
    return train(Losses(), [torch.randn(7, 3, 8), target], wrap)


class Indexing(nn.Module):
    """Gathers and scatters, sorting, running sums and contractions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8, 4) / 3)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.sin(self.layer(x))
        ordered, order = torch.sort(h, dim=-1)
        top, where = torch.topk(torch.sin(ordered), 3, dim=0)
        added = torch.zeros_like(h).index_add(0, index, torch.exp(h))
        spread = torch.zeros_like(h).scatter(1, order, h * 2).scatter_add(0, where, top)
        reduced = torch.zeros_like(h).scatter_reduce(0, index[:, None].expand_as(h), h, "amax", include_self=False)
        mixed = torch.einsum("bi,ijk,bj->bk", torch.sin(added), self.mix, spread)
        running = torch.cumsum(torch.sin(reduced), 0) * torch.cumprod(1 + 0.1 * h, 1)
        put = spread.index_put((index,), h, accumulate=True)
        return mixed, running, torch.gather(put, 1, order), torch.logcumsumexp(h, 0), h[index, order[:, 0]], order


def indexing(wrap: Wrap) -> Observed:
    return train(Indexing(), [torch.randn(10, 8, requires_grad=True), torch.randint(0, 10, (10,))], wrap)


class Spectral(nn.Module):
    """A filter in the frequency domain, a short-time transform, and linear algebra."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.layer = nn.Parameter(torch.rand(9)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.sin(torch.fft.irfft(torch.fft.rfft(torch.sin(self.layer(x))) * self.gain, n=16))
        frames = torch.stft(h, 8, 4, window=torch.hann_window(8), return_complex=True).abs()
        square = h.t() @ h + torch.eye(16)
        solved = torch.linalg.solve(square, torch.sin(h.t()))
        return torch.sqrt(frames + 1), solved, torch.linalg.cholesky(square).diagonal().log(), torch.linalg.norm(h)


def spectral(wrap: Wrap) -> Observed:
    return train(Spectral(), [torch.randn(6, 16, requires_grad=True)], wrap)


class Bags(nn.Module):
    """Embedding bags of every mode, and an embedding whose rows are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.mean = nn.EmbeddingBag(11, 8, mode="sum"), nn.EmbeddingBag(11, 8, mode="mean")
        self.max, self.rows = nn.EmbeddingBag(11, 8, mode="max"), nn.Embedding(11, 8, scale_grad_by_freq=True)
        self.layer = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 3, 3, 7])
        h = torch.sin(self.sum(ids, offsets, per_sample_weights=torch.exp(weights)))
        h = torch.sin(self.layer(h + self.mean(ids, offsets)) * self.max(ids, offsets))
        return torch.cat([h, torch.sin(self.layer(self.rows(ids)))])


def bags(wrap: Wrap) -> Observed:
    return train(Bags(), [torch.arange(12) % 5, torch.randn(12, requires_grad=True)], wrap)


class Norms(nn.Module):
    """Norms of vectors and weights, and attention with a mask and fewer heads for keys than for queries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.rms, self.local = nn.RMSNorm(8), nn.LocalResponseNorm(2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.rms(torch.sin(self.layer(x)))
        h = h + self.attention(h, h, h, key_padding_mask=mask, need_weights=False)[0]
        q, k = h.unflatten(-1, (4, 2)).transpose(1, 2), torch.sin(h[..., :4]).unflatten(-1, (2, 2)).transpose(1, 2)
        shared = F.scaled_dot_product_attention(q, k, k, attn_mask=~mask[:, None, None, :], enable_gqa=True)
        return self.local(F.normalize(h, dim=-1)) * torch.sin(shared.transpose(1, 2).flatten(2))


def norms(wrap: Wrap) -> Observed:
    return train(Norms(), [torch.randn(3, 5, 8, requires_grad=True), torch.arange(15).view(3, 5) % 4 == 3], wrap)


class Sparse(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(11, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.layer(torch.sin(self.rows(ids))))


def sparse_gradient(wrap: Wrap) -> Observed:
    seen = train(Sparse(), [torch.arange(12) % 5], wrap)
    return {name: v.to_dense() if isinstance(v, torch.Tensor) else v for name, v in seen.items()}


EAGER = ("eager",)
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}  # sums of many products, in another order

CASES = [
    Case("images", images, **CLOSE),
    Case("volumes", volumes, compilers=EAGER, **CLOSE),
    Case("losses", losses, **CLOSE),
    Case("indexing", indexing, **CLOSE),
    Case("spectral", spectral, compilers=EAGER, rtol=1e-4, atol=1e-3),
    Case("bags", bags),
    Case("norms", norms, compilers=EAGER, **CLOSE),
    Case("sparse_gradient", sparse_gradient, compilers=EAGER),
]


def test_operators(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)
