"""Memory that real ranks hold and measure, each function in a gloo process group; forecasts are compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from compile_remat._torch.ranks.wrappers import local_nbytes
from compile_remat.device.measure import recorded
from tests.forecast.mesh.models import sections, stack
from tests.ranks.gloo import waiting_for_threads

STEPS = 6

Dtypes = tuple[torch.dtype | None, torch.dtype | None]
"""The dtype in which FSDP2 gathers parameters, and the dtype in which it reduces gradients."""


@dataclass(frozen=True)
class RealRank:
    """Bytes that one rank holds and measures.

    Attributes:
        gathered_bytes: The most that a forward on one row without gradients allocates: parameters that FSDP2 gathers; 0 without it.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int


def real_rank(rank: int, dp: int, tp: int, shard: str) -> RealRank:
    """A step of a stack on a mesh, in eager mode."""
    model, x, _ = _on_mesh(dp, tp, shard)
    gathered_bytes = _gathered(model, x[:1]) if shard != "ddp" else 0
    _reshard(model)
    wrapped: Any = model
    if shard == "ddp" and dp > 1:
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped(x).backward()
    optimizer.step()
    state = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    sums = (sum(map(local_nbytes, tensors)) for tensors in (model.parameters(), gradients, state))
    return RealRank(*sums, gathered_bytes)


def region_peak(rank: int, dp: int, tp: int, shard: str, budget: str) -> int:
    """The measured region peak of the whole model's graph, or under FSDP2 by blocks of one block's.

    FSDP2 has gathered the parameters before, so that only the graph allocates.
    """
    model, x, mesh = _on_mesh(dp, tp, "ddp")
    module: Any = model.blocks[1] if shard == "fsdp2" else model
    if shard != "ddp":
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    step = torch.compile(module, backend="remat", options={"memory_budget": budget})
    x.requires_grad_(shard == "fsdp2")
    measured = []
    for _ in range(STEPS):
        module.zero_grad()
        x.grad = None
        if shard != "ddp":
            module.unshard()
        incoming = torch.ones_like(x) if shard == "fsdp2" else torch.ones(())
        with waiting_for_threads(), recorded("cpu") as peaks:
            step(x).backward(incoming)
        measured.append(peaks[0].peak_bytes)
    return min(measured[1:])  # threads of gloo hold what tensor parallelism reduces a moment longer in some steps


def whole_step(
    rank: int, sizes: tuple[int, int], shard: str, reshard: bool | None, dtypes: Dtypes, budget: str
) -> list[int]:
    """Peak bytes of a rank in some steps of AdamW, compiled inside a budget, with all that was allocated before the steps."""
    torch.manual_seed(0)
    with recorded("cpu") as there:
        model, inputs = sections(*sizes)
        module: Any = model
        if shard == "ddp":
            module = nn.parallel.DistributedDataParallel(model, init_sync=False)  # see `tests.ranks.gloo`
        else:
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            policy = MixedPrecisionPolicy(*dtypes)
            for part in [*(model.blocks if shard == "fsdp2" else ()), model]:
                fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    options = {"backend": "remat", "options": {"memory_budget": budget}}
    if shard == "fsdp2":
        for part in (model.enter, *model.blocks, model.leave):
            part.compile(**options)
    else:
        module = torch.compile(module, **options)

    def step() -> None:
        module(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS // 2):
        step()
    return [there[0].end_bytes + _peak(step) for _ in range(STEPS // 2)]


def _peak(step: Callable[[], None]) -> int:
    with waiting_for_threads(), recorded("cpu") as peaks:
        step()
    return peaks[0].peak_bytes


def _on_mesh(dp: int, tp: int, shard: str) -> tuple[Any, torch.Tensor, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    made, (x,) = stack(mesh=mesh)
    model: Any = made
    if shard != "ddp":
        for block in model.blocks if shard == "fsdp2" else ():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model, x, mesh


def _gathered(model: nn.Module, row: torch.Tensor) -> int:
    _reshard(model)
    with torch.no_grad(), waiting_for_threads(), recorded("cpu") as peaks:
        model(row)
    return peaks[0].peak_bytes


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
