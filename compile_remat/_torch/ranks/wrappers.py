"""What DDP and FSDP2 know of themselves: parameters in groups, their types, and what is gathered now.

Private names: ``DistributedDataParallel._active_ddp_module``; ``FSDPState`` with ``_fsdp_param_groups`` (before 2.13
``_fsdp_param_group``), ``_state_ctx``, ``_comm_ctx``, ``_is_root`` and ``_auto_reshard_after_forward``, ``FSDPParamGroup`` with
``fsdp_params``, ``modules``, ``device``, ``mesh_info``, ``is_unsharded`` and ``_reshard_after_forward``,
``FSDPParam`` with ``sharded_param``, ``_sharded_param_data``, ``_orig_size`` and ``mp_policy`` (from 2.15 on each has its own), and
``torch.distributed._composable_state._module_state_mapping``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class FsdpGroup:
    """Parameters that FSDP2 gathers together, in bytes of one rank.

    Attributes:
        gathered_bytes: All of them, padded, in the type of the forward.
        gradient_bytes: Their gradients, as the backward makes them.
        reduced_bytes: The padded gradients in the type that they are reduced in.
        output_bytes: This rank's part of the latter.
        shard_bytes: This rank's part of the gradients, in the type of the parameters.
        cast_bytes: What brings the gradients to the type that they are reduced in; a GPU does it on the way.
        last_gradient_bytes: The gradient of the last parameter that is trained, which is freed behind the others.
        gather_cast_bytes: This rank's part of the parameters in the type of the forward, where that is not their own.
        gather_copy_bytes: What gloo, on a CPU, takes for itself to gather them; NCCL takes nothing.
        reduce_copy_bytes: The same to reduce the gradients.
        stays: Whether they stay gathered from the forward to the backward.
        is_outer: Whether other groups lie inside, so that these stay gathered while those run.
        is_gathered: Whether they are gathered now.
    """

    gathered_bytes: int
    gradient_bytes: int
    reduced_bytes: int
    output_bytes: int
    shard_bytes: int
    cast_bytes: int = 0
    last_gradient_bytes: int = 0
    gather_cast_bytes: int = 0
    gather_copy_bytes: int = 0
    reduce_copy_bytes: int = 0
    stays: bool = False
    is_outer: bool = False
    is_gathered: bool = False


@dataclass(frozen=True)
class FsdpTree:
    """A model under FSDP2.

    Attributes:
        groups: In the order of the forward.
        trainable_bytes: This rank's shards of what is trained.
        flat_bytes: What was gathered last, and is held once more.
    """

    groups: tuple[FsdpGroup, ...]
    trainable_bytes: int
    flat_bytes: int


def local_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor on this rank: of its part, where it is spread over a device mesh."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.nbytes


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor is spread over a device mesh."""
    return hasattr(tensor, "_local_tensor")


def running_ddp() -> nn.Module | None:
    """The model under DDP whose forward runs now."""
    found: nn.Module | None = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return found


def running_fsdp() -> FsdpTree | None:
    """The model under FSDP2 whose forward runs now."""
    for state in _all_states():
        if getattr(state, "_is_root", False) and state._state_ctx.iter_forward_root is state:
            return _tree(state._state_ctx.all_states)
    return None


def fsdp_tree(model: nn.Module, device_type: str | None = None) -> FsdpTree | None:
    """What FSDP2 has made of a model; None where it has not been applied.

    Args:
        device_type: Where it trains, if its parameters are not there.
    """
    states = [state for module in model.modules() if (state := _state_of(module)) is not None]
    unique = list(dict.fromkeys(states))
    return _tree(unique, device_type) if unique else None


def _all_states() -> Iterator[Any]:
    from torch.distributed import _composable_state

    for reference in list(_composable_state._module_state_mapping.values()):
        state = reference()
        if hasattr(state, "_state_ctx"):
            yield state


def _state_of(module: nn.Module) -> Any:
    from torch.distributed import _composable_state

    state = _composable_state._get_module_state(module)
    return state if hasattr(state, "_state_ctx") else None


def _tree(states: list[Any], device_type: str | None = None) -> FsdpTree:
    roots = [state for state in states if state._is_root] or states[:1]
    pairs = [(state, group) for state in states for group in _groups_of(state)]
    modules = [set(group.modules) for _, group in pairs]
    groups = []
    for k, (state, group) in enumerate(pairs):
        below = {child for module in group.modules for child in module.modules()}
        is_outer = any(k != n and others <= below for n, others in enumerate(modules))
        keeps = state in roots and state._auto_reshard_after_forward
        stays = keeps or not group._reshard_after_forward
        groups.append(_facts(group, device_type or group.device.type, stays=stays, is_outer=is_outer))
    trained = [param.sharded_param for _, group in pairs for param in group.fsdp_params]
    trainable_bytes = sum(local_nbytes(p) for p in trained if p.requires_grad)
    context = getattr(roots[0], "_comm_ctx", None)
    held = getattr(context, "all_gather_state", None)
    flat_bytes = 0 if held is None else held.all_gather_result.all_gather_output.nbytes
    return FsdpTree(tuple(groups), trainable_bytes, flat_bytes)


def _groups_of(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (several if several is not None else [state._fsdp_param_group]) if group is not None]


def _facts(group: Any, device_type: str, *, stays: bool, is_outer: bool) -> FsdpGroup:
    size = getattr(group.mesh_info, "shard_mesh_size", 1)
    is_on_cpu = device_type == "cpu"
    gathered = gradients = reduced = output = shard = cast = last = gather_cast = 0
    for param in group.fsdp_params:
        dtype: torch.dtype = param.sharded_param.dtype
        given, sent = param.mp_policy.param_dtype or dtype, param.mp_policy.reduce_dtype
        padded = param._sharded_param_data.numel()
        gathered += size * padded * given.itemsize
        gather_cast += padded * given.itemsize * (given != dtype)
        if param.sharded_param.requires_grad:
            last = param._orig_size.numel() * given.itemsize
            gradients += last
            reduced += size * padded * (sent or given).itemsize
            output += padded * (sent or given).itemsize
            shard += padded * dtype.itemsize
            if is_on_cpu and sent not in (None, given):
                cast += param._orig_size.numel() * given.itemsize
    return FsdpGroup(
        gathered_bytes=gathered,
        gradient_bytes=gradients,
        reduced_bytes=reduced,
        output_bytes=output,
        shard_bytes=shard,
        cast_bytes=cast,
        last_gradient_bytes=last,
        gather_cast_bytes=gather_cast,
        gather_copy_bytes=gathered * is_on_cpu,
        reduce_copy_bytes=reduced * is_on_cpu,
        stays=stays,
        is_outer=is_outer,
        is_gathered=bool(group.is_unsharded),
    )
