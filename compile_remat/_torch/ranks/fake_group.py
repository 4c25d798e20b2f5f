"""Fake ranks: torch's fake process group, and a twin of a model on `meta` to which FSDP2 can be applied.

Collectives of the fake group do nothing, so one process stands for rank 0 of any number.  ``fully_shard`` after tensor parallelism
makes a new device mesh, whose ranks have to be read from a tensor: this fails under a ``FakeTensorMode`` (2.13), and succeeds with
`meta` tensors outside of the mode.  Imports nothing of compile_remat.

Private names, the same in 2.11 to 2.15: ``torch.testing._internal.distributed.fake_pg.FakeStore``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def has_process_group() -> bool:
    """Returns whether this process has a default process group already."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def fake_mesh(sizes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Yields a device mesh of these sizes by name, the last one innermost.

    This process is its rank 0, and must not have a process group yet.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shape = tuple(sizes.values())
    world_size = 1
    for size in shape:
        world_size *= size
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=tuple(sizes))
    finally:
        torch.distributed.destroy_process_group()


def meta_twin(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` without hooks, its parameters and buffers on `meta`, with the same sizes, strides and placements.

    Modules, parameters and buffers that are shared in the model are shared in its twin.
    """
    made: dict[int, Any] = {}
    return _twin(model, made)


def _twin(module: nn.Module, made: dict[int, Any]) -> nn.Module:
    if id(module) in made:
        found: nn.Module = made[id(module)]
        return found
    twin = made[id(module)] = object.__new__(type(module))
    for name, value in vars(module).items():
        twin.__dict__[name] = OrderedDict() if isinstance(value, OrderedDict) else value
    twin.__dict__["_modules"] = {k: m and _twin(m, made) for k, m in module._modules.items()}
    twin.__dict__["_parameters"] = {k: _on_meta(p, made) for k, p in module._parameters.items()}
    twin.__dict__["_buffers"] = {k: _on_meta(b, made) for k, b in module._buffers.items()}
    return twin


def _on_meta(tensor: torch.Tensor | None, made: dict[int, Any]) -> Any:
    if tensor is None or id(tensor) in made:
        return None if tensor is None else made[id(tensor)]
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    empty: torch.Tensor = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    if local is not tensor:
        from torch.distributed.tensor import DTensor

        spread: Any = tensor
        empty = DTensor.from_local(
            empty, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
        )
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    made[id(tensor)] = empty
    return empty
