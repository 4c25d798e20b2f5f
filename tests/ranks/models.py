"""Small models under DDP, FSDP2 and tensor parallelism, and what a rank sees when it trains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import compile_remat
from compile_remat.device.measure import peak_bytes, recorded
from tests.ranks.gloo import waiting_for_threads

WIDTH, ROWS, BLOCKS = 64, 512, 3
STEPS = 3
WRAPPERS = (
    "ddp",
    "ddp, buckets",
    "fsdp whole, keep",
    "fsdp whole, reshard",
    "fsdp blocks, keep",
    "fsdp blocks, reshard",
    "tp",
)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x.square().mean()


def width_of(wrapper: str) -> int:
    """Twice as wide where there are to be several buckets: torch cuts the graph after the first MiB of gradients."""
    return 2 * WIDTH if "buckets" in wrapper else WIDTH


def wrapped(wrapper: str, options: dict[str, Any] | None, *, is_checkpointed: bool = False) -> nn.Module:
    """A stack under a wrapper, compiled under these options of the backend; None: not compiled."""
    torch.manual_seed(0)
    model = Stack(width=width_of(wrapper), is_checkpointed=is_checkpointed)
    given: dict[str, Any] = {"backend": "remat", "options": options}
    if wrapper.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1 if "buckets" in wrapper else 25)
    else:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        if wrapper == "tp":
            for block in model.blocks:
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            for block in model.blocks if "blocks" in wrapper else ():
                fully_shard(block, mesh=mesh, reshard_after_forward="reshard" in wrapper)
            fully_shard(model, mesh=mesh, reshard_after_forward="reshard" in wrapper)
    if options is None:
        return model
    if "blocks" in wrapper:
        for block in model.blocks:
            block.compile(**given)
        return model
    return torch.compile(model, **given)


@dataclass(frozen=True)
class Seen:
    """Results of one rank.

    Attributes:
        losses: Loss of each step.
        peak_bytes: Peak of the last step above the bytes allocated before it.
        plans: The values that each compiled graph saves, in order, with the predicted peak in bytes and the budget.
    """

    losses: list[float]
    peak_bytes: int
    plans: list[tuple[tuple[str, ...], int, int | None]]


def trained(rank: int, wrapper: str, options: dict[str, Any] | None, rows: int = ROWS) -> Seen:
    """Some steps of SGD; the ranks have data of their own, but for tensor parallelism."""
    model = wrapped(wrapper, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses, peak_bytes = [], 0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + (0 if wrapper == "tp" else rank))
        x = torch.randn(rows, width_of(wrapper), generator=generator)
        optimizer.zero_grad()
        if step == STEPS - 1:
            with waiting_for_threads(), recorded("cpu") as peaks:
                losses.append(_step(model, x))
            peak_bytes = peaks[0].peak_bytes
        else:
            losses.append(_step(model, x))
        optimizer.step()
    found = [report for report in compile_remat.reports() if report.plan is not None]
    plans = [(report.plan.saved, report.plan.peak_bytes, report.budget_bytes) for report in found if report.plan]
    return Seen(losses, peak_bytes, plans)


def eager_loss_bytes(wrapper: str) -> int:
    """The most that the loss and its backward hold where only the blocks are compiled, and torch runs the loss by itself."""
    x = torch.randn(ROWS, width_of(wrapper), requires_grad=True)
    return peak_bytes(lambda: Stack(0)(x).backward(), "cpu").peak_bytes if "blocks" in wrapper else 0


def _step(model: nn.Module, x: torch.Tensor) -> float:
    loss = model(x)
    loss.backward()
    return loss.item()
