"""Pins of the user: gradients are right under any policy, and the masks of a recomputed dropout are the forward's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.correctness.harness import Case, Observed, Wrap, check, train

ATEN = torch.ops.aten


class Layer(nn.Module):
    """Norm, two matmuls and a residual; the derivative of each part depends on the values and masks before it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout)
        return x + F.dropout(torch.sin(self.down(y)), self.dropout)


class Checkpointed(nn.Module):
    """Two layers in regions, as `region` makes them, and a plain one."""

    def __init__(self, region: Callable[..., Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(dropout) for _ in range(3)])
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x) if k == 2 else self.region(layer, x)
        return torch.sin(x)


def plain(**keywords: Any) -> Callable[..., Any]:
    return functools.partial(checkpoint, **keywords)


def selective(policy: Any) -> Callable[..., Any]:
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=context)


def by_policy(products: CheckpointPolicy, others: CheckpointPolicy) -> Callable[..., Any]:
    def policy(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        return products if operator in (ATEN.mm.default, ATEN.addmm.default) else others

    return selective(policy)


MIXED = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.PREFER_RECOMPUTE,
    CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_SAVE,
)


def mixed(function: Callable[..., Any], x: Tensor) -> Tensor:
    """Each operator under the next policy, so that neighbours contradict each other."""
    count = 0

    def policy(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        nonlocal count
        count += 1
        return MIXED[count % len(MIXED)]

    result: Tensor = selective(policy)(function, x)
    return result


def training(region: Callable[..., Any], dropout: float = 0.0) -> Callable[[Wrap], Observed]:
    def run(wrap: Wrap) -> Observed:
        model = Checkpointed(region, dropout)
        return train(model, [torch.randn(16, 8, requires_grad=True)], wrap)

    return run


def nested(wrap: Wrap) -> Observed:
    inner = plain(use_reentrant=False)

    def region(layer: Callable[..., Any], x: Tensor) -> Any:
        return inner(lambda y: torch.sin(inner(layer, y)) * y, x)

    return training(region)(wrap)


def normalised(wrap: Wrap) -> Observed:
    """Eager mode moves the statistics once more when it recomputes; compiled, they move once, as without checkpoint."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    return train(Net(), [torch.randn(16, 8)], wrap)


def resized(wrap: Wrap) -> Observed:
    """Batches of several sizes through one regions's model: the second compilation has symbolic sizes."""
    call = wrap(Checkpointed(plain(use_reentrant=False)))
    seen: dict[str, Any] = {}
    for size in (16, 24, 9):
        x = torch.randn(size, 8, requires_grad=True)
        call(x).square().sum().backward()
        seen[f"gradient of {size}"] = x.grad
    return seen


SAVE_PRODUCTS = by_policy(CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
PREFER_PRODUCTS = by_policy(CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE)
AGAIN_PRODUCTS = by_policy(CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE)

CASES = [
    Case("checkpoint", training(plain(use_reentrant=False), 0.3), reference="compiled"),
    Case("reentrant", training(plain(use_reentrant=True), 0.3), reference="compiled"),
    Case("must", training(SAVE_PRODUCTS, 0.3), reference="compiled"),
    Case("prefer", training(PREFER_PRODUCTS, 0.3), reference="compiled", compilers=("eager",)),
    Case("must, turned round", training(AGAIN_PRODUCTS)),
    Case("operator list", training(selective([ATEN.mm.default, ATEN.addmm.default])), compilers=("eager",)),
    Case("every operator another policy", training(mixed)),
    Case("nested", nested),
    Case("batch norm", normalised, reference="compiled"),
    Case("several sizes", resized, compilers=("eager",)),
]


def test_pins(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)
