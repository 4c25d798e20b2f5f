"""A process that trains small models under several settings and prints what it saw: run by `tests.processes`.

Reads a JSON list of jobs from its standard input.  A job names a model and a batch, and has the keyword arguments of
`torch.compile`; environment variables are the caller's.  One line of JSON for each goes to standard output.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import compile_remat
from compile_remat._util.user_warnings import forget_warnings
from compile_remat.backend import remat


class Chain(nn.Module):
    """Layers whose outputs are all wanted by the backward; a graph break in the middle where asked."""

    def __init__(self, layers: int, *, breaks: bool = False, region: bool = False, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.breaks = breaks
        self.layer = torch.compiler.nested_compile_region(_layer) if region else _layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            if self.breaks and 2 * k == len(self.layers):
                torch._dynamo.graph_break()
            x = self.layer(x, layer.weight, layer.bias)
        return x


def _layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.sin(F.linear(x, weight, bias))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.proj(attended.transpose(1, 2).reshape(b, s, d)), 0.1)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Branches(nn.Module):
    """A convolutional net whose branches are as large as each other, with skips: many ties for a planner to break."""

    def __init__(self, stages: int, channels: int = 4) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3)]) for _ in range(stages)]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(2 * channels) for _ in range(stages)])
        self.mixes = nn.ModuleList([nn.Conv2d(2 * channels, channels, 1) for _ in range(stages)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for (left, right, skip), norm, mix in zip(self.stages, self.norms, self.mixes, strict=True):
            both = torch.cat([F.relu(left(x)), torch.sigmoid(right(x))], dim=1)
            x = x + F.silu(mix(norm(both))) + torch.tanh(skip(x))
        return x.mean((2, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "chain": (lambda: Chain(4), (8,)),
    "broken": (lambda: Chain(4, breaks=True), (8,)),
    "regions": (lambda: Chain(4, region=True), (8,)),
    "transformer": (lambda: nn.Sequential(*[Block(8) for _ in range(3)]), (16, 8)),
    "branches": (lambda: Branches(3), (4, 8, 8)),
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One step of training: the reports, torch's cache counters, and whether the gradients are those of eager mode."""
    torch.compiler.reset()
    compile_remat.reset_reports()
    forget_warnings()
    counters.clear()
    make, shape = MODELS[job["model"]]
    torch.manual_seed(0)
    model, x = make(), torch.randn(job.get("batch", 64), *shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", compile_remat.PlannerWarning)
        actual = _gradients(torch.compile(model, backend=remat, **job.get("compile", {})), model, x)
    found = {
        "reports": [json.loads(report.to_json()) for report in compile_remat.reports()],
        "warnings": [str(w.message) for w in caught if issubclass(w.category, compile_remat.PlannerWarning)],
        "partition_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "partition_misses": counters["aot_autograd"]["autograd_cache_miss"],
        "graph_hits": counters["inductor"]["fxgraph_cache_hit"],
        "graph_misses": counters["inductor"]["fxgraph_cache_miss"],
    }
    if job.get("compare", True):
        torch.testing.assert_close(actual, _gradients(model, model, x), rtol=1e-4, atol=1e-5)
    return found


def _gradients(call: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    call(x).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


if __name__ == "__main__":
    for each in json.load(sys.stdin):
        print(json.dumps(run(each)), flush=True)
