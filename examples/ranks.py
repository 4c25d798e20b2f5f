"""Training on several ranks inside a memory budget: DDP, or FSDP2 by blocks.

    torchrun --nproc-per-node 2 examples/ranks.py --wrapper fsdp2 --budget min    # seconds, on a CPU too

The budget is for the compiled graphs of one rank; what the wrapper holds beside them is printed as well
(docs/guides/several-ranks.md).  Under FSDP2 each block is compiled by itself, and its
parameters are gathered before it runs and let go after it.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import compile_remat
from compile_remat.ranks.wrappers import held_by

MIB = 1 << 20


class Block(nn.Module):
    """Two layers with a residual path, on float[rows, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A stack of blocks that returns its loss."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def wrapped(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model under its wrapper, compiled."""
    torch.manual_seed(0)  # all ranks begin with the same parameters
    model = Model(arguments.blocks, arguments.width).to(device)
    options = {"memory_budget": arguments.budget}
    if arguments.wrapper == "ddp":
        replica = nn.parallel.DistributedDataParallel(model)
        replica.compile(backend="remat", options=options)
        return replica
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
        block.compile(backend="remat", options=options)
    fully_shard(model, mesh=mesh)
    return model


def train(arguments: argparse.Namespace, device: torch.device) -> list[float]:
    """The mean loss of all ranks in each step; every rank has data of its own."""
    model = wrapped(arguments, device)
    held = held_by(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(distributed.get_rank())
    x = torch.randn(arguments.rows, arguments.width, generator=generator).to(device)
    losses = []
    for _ in range(arguments.steps):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / distributed.get_world_size())
    if distributed.get_rank() == 0 and held is not None:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(f"{arguments.wrapper} holds {held.beside_bytes / MIB:.1f} MiB beside the graphs")
        print(compile_remat.reports()[-1])
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train on the ranks that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrapper", default="fsdp2", choices=("ddp", "fsdp2"))
    parser.add_argument("--budget", default="min", help='such as "20GiB", "0.5", "auto" (default min)')
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=512)
    arguments = parser.parse_args(argv)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        device = torch.device("cpu")
        if kind == "cuda":
            device = torch.device("cuda", distributed.get_node_local_rank())
            torch.cuda.set_device(device)
        return train(arguments, device)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
