"""The state of DDP and FSDP2: groups of parameters, their dtypes, and the parameters that are gathered now.

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
        gathered_bytes: All parameters of the group, padded, in the dtype of the forward.
        gradient_bytes: Their gradients, as the backward makes them.
        reduced_bytes: The padded gradients in the dtype in which they are reduced.
        output_bytes: This rank's shard of `reduced_bytes`.
        shard_bytes: This rank's shard of the gradients, in the dtype of the parameters.
        cast_bytes: Bytes that a cast of the gradients to the reduced dtype takes on a CPU; 0 on a GPU, which casts as it copies.
        last_gradient_bytes: The gradient of the last parameter that is trained, which is freed after the others.
        gather_cast_bytes: This rank's shard of the parameters in the dtype of the forward, if that is not their own.
        gather_copy_bytes: Workspace of gloo, on a CPU, for gathering the parameters; NCCL needs none.
        reduce_copy_bytes: Workspace of gloo for reducing the gradients.
        stays: True if the parameters stay gathered from the forward to the backward.
        is_outer: True if other groups lie inside of this one, so that its parameters stay gathered while the others run.
        is_gathered: True if the parameters are gathered now.
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
        groups: Groups of parameters, in the order of the forward.
        trainable_bytes: This rank's shards of the parameters that are trained.
        flat_bytes: The flat output of the last all-gather, which FSDP2 still holds beside the gathered parameters; 0 if none.
    """

    groups: tuple[FsdpGroup, ...]
    trainable_bytes: int
    flat_bytes: int


def local_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor on this rank: of its local part if the tensor is a DTensor."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.nbytes


def is_spread(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a DTensor, spread over a device mesh."""
    return hasattr(tensor, "_local_tensor")


def running_ddp() -> nn.Module | None:
    """Returns the model under DDP whose forward runs now; None if there is none."""
    found: nn.Module | None = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return found


def running_fsdp() -> FsdpTree | None:
    """Returns the model under FSDP2 whose forward runs now; None if there is none."""
    for state in _all_states():
        if getattr(state, "_is_root", False) and state._state_ctx.iter_forward_root is state:
            return _tree(state._state_ctx.all_states)
    return None


def fsdp_tree(model: nn.Module, device_type: str | None = None) -> FsdpTree | None:
    """Returns FSDP2's groups of a model; None if FSDP2 has not been applied to it.

    Args:
        device_type: Type of the device on which the model trains; None for the device of its parameters.
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
