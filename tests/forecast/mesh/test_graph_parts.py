"""A graph cut at blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from compile_remat.cost_models import load_device
from compile_remat.forecast.fake_trace import show_graphs
from compile_remat.forecast.mesh.graph_parts import Part, parts_of, parts_under_ddp
from tests.forecast.mesh.models import Net
from tests.ranks.models import Block

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


class Checkpointed(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(x), tokens)


def cut(model: nn.Module, blocks: Sequence[str] = BLOCKS, *, is_ddp: bool = False) -> list[Part]:
    found: list[Part] = []

    def see(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
        found.extend(parts_under_ddp(gm, inputs) if is_ddp else parts_of(gm, inputs, blocks))

    show_graphs(model, (torch.zeros(8, dtype=torch.int64),), see, "model", load_device("cpu"))
    return found


def test_parts_are_blocks_and_what_lies_around() -> None:
    parts = cut(Net())
    assert [part.block for part in parts] == ["", *BLOCKS, ""]
    assert all(part.needs_gradient for part in parts)


def test_equal_blocks_have_equal_keys() -> None:
    keys = [part.key() for part in cut(Net())]
    assert keys[1] == keys[2] == keys[3] and len(set(keys)) == 3


def test_a_block_of_other_sizes_or_operators_has_another_key() -> None:
    model = Net()
    model.blocks[1].up, model.blocks[1].down = nn.Linear(64, 32), nn.Linear(32, 64)
    model.blocks[2].forward = lambda x: x * 2 + Block.forward(model.blocks[2], x)  # type: ignore[arg-type, assignment]
    keys = [part.key() for part in cut(model)]
    assert len(set(keys)) == 5


def test_a_frozen_block_has_another_key() -> None:
    model = Net()
    model.blocks[2].requires_grad_(False)
    keys = [part.key() for part in cut(model)]
    assert keys[1] == keys[2] != keys[3]


def test_a_checkpointed_block_is_found_by_what_it_runs() -> None:
    parts = cut(Checkpointed())
    assert [part.block for part in parts] == ["", *BLOCKS, ""]
    assert parts[1].key() == parts[2].key() != cut(Net())[1].key()


def test_without_blocks_there_is_one_part() -> None:
    (part,) = cut(Net(), ())
    assert part.block == ""


class Deep(Net):
    """Seven blocks of 270,848 bytes: the last four, behind the head's 25 KiB, fill DDP's first bucket of 1 MiB."""

    def __init__(self) -> None:
        super().__init__(7)
        for block in self.blocks:
            block.up, block.down = nn.Linear(64, 512), nn.Linear(512, 64)


class CheckpointedDeep(Deep):
    forward = Checkpointed.forward


@pytest.mark.parametrize("model", [Deep, CheckpointedDeep])
def test_under_ddp_parts_lie_between_buckets(model: type[nn.Module]) -> None:
    parts = cut(model(), is_ddp=True)
    assert [part.block for part in parts] == ["", ""] and all(part.needs_gradient for part in parts)
    trained = [sum(t.nbytes for t in part.inputs if isinstance(t, nn.Parameter)) for part in parts]
    assert sum(trained) == sum(p.nbytes for p in model().parameters())
    assert (1 << 20) <= trained[1] < (1 << 20) + 400_000


def test_gradients_in_one_bucket_are_one_part_under_ddp() -> None:
    (part,) = cut(Net(), is_ddp=True)
    assert part.needs_gradient


def test_parts_under_ddp_are_torchs_to_switch_off() -> None:
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert len(cut(Deep(), is_ddp=True)) == 1
