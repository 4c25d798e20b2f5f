"""Modules that are blocks."""

from __future__ import annotations

from torch import nn

from compile_remat.forecast.mesh.blocks import blocks_of
from tests.forecast.mesh.models import Net


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def test_entries_of_lists_with_several_matrices_are_blocks() -> None:
    assert list(blocks_of(Net())) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_list_of_single_layers_has_none() -> None:
    assert blocks_of(mlp()) == {}
    assert blocks_of(nn.Linear(4, 4)) == {}


def test_the_outermost_entry_is_the_block() -> None:
    model = nn.Sequential(nn.Sequential(mlp(), mlp()), mlp())
    assert list(blocks_of(model)) == ["0", "1"]


def test_what_is_never_called_is_looked_into() -> None:
    model = nn.ModuleList([nn.ModuleList([mlp(), nn.Linear(4, 4)])])
    assert list(blocks_of(model)) == ["0.0"]


def test_a_shared_block_is_one() -> None:
    block = mlp()
    assert list(blocks_of(nn.Sequential(block, block))) == ["0"]
