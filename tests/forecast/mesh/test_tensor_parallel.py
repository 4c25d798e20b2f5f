"""Tensor parallelism of the named transformers: on a small one with the same names, and on those that can be built here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common.torchvision_operators import declare_missing_operators
from compile_remat._torch.fake import NumbersAreZero, fake_tensors
from compile_remat._torch.ranks.fake_group import fake_mesh
from compile_remat._torch.ranks.wrappers import is_spread, local_nbytes
from compile_remat.errors import ConfigError
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.mesh.layout import MeshLayout
from compile_remat.forecast.mesh.rank_forecast import forecast_rank
from compile_remat.forecast.target_step import Target
from compile_remat.forecast.zoo.tensor_parallel import spread_over

HEADS, WIDTH, WORDS = 4, 32, 96


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            p(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down_proj(F.silu(self.up_proj(self.between(x))))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), tokens.flatten())


def small(batch: int = 2, seq: int = 16, mesh: Any = None) -> tuple[nn.Module, tuple[torch.Tensor]]:
    model = Small()
    spread_over(model, mesh, heads=HEADS, vocabulary=True)
    return model, (torch.zeros(batch, seq, dtype=torch.int64),)


@pytest.fixture
def mesh() -> Iterator[Any]:
    with fake_mesh({"dp": 1, "tp": 2}) as found:
        yield found


def test_matrices_are_halved_and_norms_are_not(mesh: Any) -> None:
    with fake_tensors(), NumbersAreZero():
        model, _ = small(mesh=mesh)
    whole = dict(Small().named_parameters())
    for name, parameter in model.named_parameters():
        assert is_spread(parameter) == ("norm" not in name and "between" not in name)
        assert local_nbytes(parameter) * (1 + is_spread(parameter)) == whole[name].nbytes


def test_a_graph_of_one_rank_has_its_heads_alone() -> None:
    whole, half = (
        forecast_rank(Builder(small), Target("h100-sxm"), MeshLayout.parse(mesh)) for mesh in ("tp=1", "tp=2")
    )
    assert half.peak_bytes < whole.peak_bytes
    assert half.collective_time_ns and not whole.collective_time_ns


def test_heads_that_cannot_be_shared_out_are_said() -> None:
    with (
        fake_mesh({"dp": 1, "tp": 3}) as three,
        pytest.raises(ConfigError, match="4 attention heads cannot be divided"),
    ):
        spread_over(Small(), three, heads=HEADS)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("name", "part"), [("bert-large", 0.547), ("llama-2-7b", 0.5), ("vit-large", 0.503), ("t5-large", 0.523)]
)
def test_the_named_ones_are_halved_but_for_what_shares_a_matrix(name: str, part: float) -> None:
    declare_missing_operators()
    local, whole = [], []
    for size, found in ((1, whole), (2, local)):
        with fake_mesh({"dp": 1, "tp": size}) as made, fake_tensors(torch.bfloat16), NumbersAreZero():
            model, _ = Builder(name, batch=1, mesh=made).build()
        found.append(sum(map(local_nbytes, model.parameters())))
    assert local[0] / whole[0] == pytest.approx(part, abs=0.01)
