"""The ranks that train together: how many there are, and a figure that all of them agree on."""

from __future__ import annotations

import torch


def smallest_of_all_ranks(nbytes: int, device: torch.device) -> int:
    """The smallest figure of all ranks of the default process group, so that all of them make the same plan.

    A collective: every rank that compiles this graph takes part.  Without a group of several ranks it is `nbytes`.
    """
    if num_ranks() == 1:
        return nbytes
    distributed = torch.distributed
    place = device if distributed.get_backend() == "nccl" else torch.device("cpu")
    smallest = torch.tensor([nbytes], dtype=torch.int64, device=place)
    distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
    return int(smallest.item())


def num_ranks() -> int:
    """How many processes train together: those of the default process group, or this one alone."""
    distributed = torch.distributed
    is_there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_there else 1
