"""Bytes of a model on one rank: its shards of parameters and gradients, and the buffers of DDP or FSDP2 beside the graphs.

FSDP2 is applied to a twin of the model on `meta`, so its groups are the same as in training.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from compile_remat._torch.ranks.fake_group import meta_twin
from compile_remat._torch.ranks.wrappers import FsdpTree, fsdp_tree, local_nbytes
from compile_remat.forecast.mesh.layout import MeshLayout
from compile_remat.ranks.wrappers import NOTHING_HELD, Held, held_by_ddp_of, held_by_fsdp


@dataclass(frozen=True)
class Shards:
    """Bytes of one rank, apart from graphs.

    Attributes:
        parameter_bytes: Bytes of the rank's shards of parameters, and of buffers.
        gradient_bytes: Bytes of its shards of the gradients of trained parameters.
        largest_bytes: Bytes of the largest such shard.
        held: Bytes that the wrapper holds beside graphs.
        tree: FSDP2's groups: the model's own, and behind it the blocks' groups in the blocks' order; None under DDP.
    """

    parameter_bytes: int
    gradient_bytes: int
    largest_bytes: int
    held: Held
    tree: FsdpTree | None = None


def shards_of(
    model: nn.Module, blocks: Collection[str], layout: MeshLayout, mesh: Any, device_type: str = "cuda"
) -> Shards:
    """Returns the bytes of rank 0.  Call it outside of a ``FakeTensorMode``, while the mesh's process group exists.

    Args:
        device_type: Type of the device on which the rank trains.
    """
    if not layout.is_fsdp:
        held = held_by_ddp_of(model) if layout.dp > 1 else NOTHING_HELD
        return Shards(_bytes_of(model), sum(_trained(model)), max(_trained(model), default=0), held)
    twin = meta_twin(model)
    policy = MixedPrecisionPolicy(layout.forward_dtype, layout.reduction_dtype)
    for module in (*map(twin.get_submodule, blocks), twin):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=layout.reshard, mp_policy=policy)
    tree = fsdp_tree(twin, device_type)
    assert tree is not None
    return Shards(_bytes_of(twin), sum(_trained(twin)), max(_trained(twin), default=0), held_by_fsdp(tree), tree)


def _bytes_of(model: nn.Module) -> int:
    return sum(map(local_nbytes, (*model.parameters(), *model.buffers())))


def _trained(model: nn.Module) -> list[int]:
    return [local_nbytes(p) for p in model.parameters() if p.requires_grad]
