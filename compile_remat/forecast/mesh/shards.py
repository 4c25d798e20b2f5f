"""What one rank holds of a model: its parts of parameters and gradients, and what DDP or FSDP2 holds beside the graphs.

FSDP2 is applied to a twin of the model on `meta`, so what it says of itself is what it says in training.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from compile_remat._torch.ranks.fake_group import meta_twin
from compile_remat._torch.ranks.wrappers import FsdpTree, fsdp_tree, local_nbytes
from compile_remat.forecast.mesh.layout import MeshLayout
from compile_remat.ranks.wrappers import NOTHING_HELD, Held, held_by_ddp_of, held_by_fsdp


@dataclass(frozen=True)
class Shards:
    """Bytes of one rank, apart from graphs.

    Attributes:
        parameter_bytes: Of its parts of parameters, and of buffers.
        gradient_bytes: Of its parts of the gradients of what is trained.
        held: What the wrapper holds beside graphs.
        tree: The model under FSDP2, the groups of its blocks in the blocks' order behind the model's own; None under DDP.
    """

    parameter_bytes: int
    gradient_bytes: int
    held: Held
    tree: FsdpTree | None = None


def shards_of(model: nn.Module, blocks: Collection[str], layout: MeshLayout, mesh: Any) -> Shards:
    """What rank 0 holds; to be called outside of the fake tensors' mode, with the mesh's process group alive."""
    if not layout.is_fsdp:
        held = held_by_ddp_of(model) if layout.dp > 1 else NOTHING_HELD
        return Shards(_bytes_of(model), _trained_bytes(model), held)
    twin = meta_twin(model)
    for path in blocks:
        fully_shard(twin.get_submodule(path), mesh=mesh["dp"], reshard_after_forward=layout.reshard)
    fully_shard(twin, mesh=mesh["dp"], reshard_after_forward=layout.reshard)
    tree = fsdp_tree(twin)
    assert tree is not None
    return Shards(_bytes_of(twin), _trained_bytes(twin), held_by_fsdp(tree), tree)


def _bytes_of(model: nn.Module) -> int:
    return sum(map(local_nbytes, (*model.parameters(), *model.buffers())))


def _trained_bytes(model: nn.Module) -> int:
    return sum(local_nbytes(p) for p in model.parameters() if p.requires_grad)
