"""Random numbers: the backward sees those that the forward drew, and they are those of plain torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.correctness.harness import Case, Observed, Wrap, check, train


class Layers(nn.Module):
    """Linear layers, each followed by one of `functions`; every derivative depends on what was drawn before it."""

    def __init__(self, *functions: Callable[[Tensor], Tensor], size: int = 8) -> None:
        super().__init__()
        self.functions = functions
        self.layers = nn.ModuleList([nn.Linear(size, size) for _ in functions])

    def forward(self, x: Tensor) -> Tensor:
        for layer, function in zip(self.layers, self.functions, strict=True):
            x = torch.sin(function(torch.sin(layer(x))))
        return x


def dropout(wrap: Wrap) -> Observed:
    return train(Layers(*[lambda x: F.dropout(x, 0.3)] * 4), [torch.randn(32, 8)], wrap)


def dropout_of_every_kind(wrap: Wrap) -> Observed:
    def of_channels(x: Tensor) -> Tensor:
        return F.dropout2d(x.view(4, 8, 8, 8), 0.3).view_as(x)

    def in_place(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.3, inplace=True)

    def of_features(x: Tensor) -> Tensor:
        return F.feature_alpha_dropout(x.view(4, 8, 8, 8), 0.3, training=True).view_as(x)

    model = Layers(of_channels, lambda x: F.alpha_dropout(x, 0.3, training=True), in_place, of_features)
    return train(model, [torch.randn(256, 8)], wrap)


def drawn_like_a_mask(wrap: Wrap) -> Observed:
    """Masks and noise drawn by hand, out of place and in place, from every common distribution."""

    def uniform(x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 0.7) * torch.rand(x.shape) + torch.empty_like(x).uniform_(0.5, 1.5) * x

    def normal(x: Tensor) -> Tensor:
        noise = torch.normal(x.detach(), 0.1) + torch.empty_like(x).normal_() + torch.normal(0.0, 1.0, x.shape)
        return x * torch.randn_like(x) + noise * x.square()

    def counts(x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.sigmoid(x.detach())) + torch.empty_like(x).bernoulli_(0.5)
        return x * mask + x * torch.randint(0, 3, x.shape)

    def choices(x: Tensor) -> Tensor:
        rows = torch.multinomial(torch.softmax(x.detach()[:, 0], 0), 32, replacement=True)
        return x[rows] * torch.empty_like(x).exponential_() * x[torch.multinomial(torch.ones(32), 32)]

    return train(Layers(uniform, normal, counts, choices), [torch.randn(32, 8)], wrap)


def drawn_by_layers(wrap: Wrap) -> Observed:
    """What libraries do: randomised slopes, sampled categories, layers that are skipped for some rows."""

    def stochastic_depth(x: Tensor) -> Tensor:
        return x + torch.tanh(x) * torch.empty(x.shape[0], 1).bernoulli_(0.6).div_(0.6)

    model = Layers(
        lambda x: F.rrelu(x, training=True),
        stochastic_depth,
        lambda x: F.gumbel_softmax(x, tau=0.7) * x,
        lambda x: F.gumbel_softmax(x, hard=True) * x,
    )
    return train(model, [torch.randn(32, 8)], wrap)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True).transpose(1, 2).reshape(x.shape)
        y, weights = self.attention(torch.sin(x), x, x)
        return torch.sin(y) + self.attention(y, y, x, need_weights=False)[0] * weights.sum()


def attention(wrap: Wrap) -> Observed:
    return train(Attention(), [torch.randn(2, 6, 16)], wrap)


class Checkpointed(nn.Module):
    """Dropout inside regions that the user wants recomputed; their random state is preserved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layers(*[lambda x: F.dropout(x, 0.3)] * 2) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=True) * torch.rand_like(x)
        return x


def checkpointed_dropout(wrap: Wrap) -> Observed:
    return train(Checkpointed(), [torch.randn(16, 8)], wrap)


class NoisyGradient(torch.autograd.Function):
    """Draws in the backward, as stochastic rounding of gradients does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


def drawn_by_the_backward(wrap: Wrap) -> Observed:
    def noisy(x: Tensor) -> Tensor:
        noisy_x: Tensor = NoisyGradient.apply(x)
        return F.dropout(noisy_x, 0.3)

    return train(Layers(noisy, noisy, noisy), [torch.randn(16, 8)], wrap)


def drawn_as_eager_mode_draws(wrap: Wrap) -> Observed:
    """Under `fallback_random` the numbers are those of eager mode, so the reference is the truth itself."""
    model = Layers(
        lambda x: F.dropout(x, 0.3),
        lambda x: x * torch.rand_like(x),
        lambda x: F.dropout(x, 0.3) + torch.randn_like(x) * x,
        lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    )
    seen = dict(train(model, [torch.randn(32, 8)], wrap))
    return {**seen, "random state": torch.get_rng_state()}


CASES = [
    Case("dropout", dropout, reference="compiled"),
    Case("every kind of dropout", dropout_of_every_kind, reference="compiled"),
    Case("rand, normal, bernoulli, multinomial", drawn_like_a_mask, reference="compiled"),
    Case("rrelu, stochastic depth, gumbel softmax", drawn_by_layers, reference="compiled"),
    Case("attention", attention, reference="compiled"),
    Case("checkpointed dropout", checkpointed_dropout, reference="compiled"),
    Case("drawn by the backward", drawn_by_the_backward, reference="compiled"),
    Case("fallback_random", drawn_as_eager_mode_draws, compilers=("inductor",), options={"fallback_random": True}),
]


def test_random(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)
