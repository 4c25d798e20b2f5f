"""What DDP and FSDP2 hold beside the compiled graphs: reduce buckets, gathered parameters, and gradients on their way.

    DDP     buckets = bytes of the gradients, from the construction of the wrapper on; with ``gradient_as_bucket_view`` they are
            what is left of the gradients after the backward, and lie beside those that a graph returns until then

    FSDP2   what `fsdp_moments` counts, moment by moment

What NCCL takes for itself is in none of torch's allocators and is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from compile_remat._torch.ranks.wrappers import FsdpTree, fsdp_tree, local_nbytes, running_ddp, running_fsdp
from compile_remat.errors import warn
from compile_remat.ranks.fsdp_step import At, fsdp_moments


@dataclass(frozen=True)
class Held:
    """What a wrapper holds, in bytes of one rank.

    Attributes:
        beside_bytes: The most that it holds at once beside graphs, gradients that graphs make not counted.
        step_bytes: The peak of a step in which graphs hold nothing but the gradients that they make.
        trainable_bytes: What an optimizer sees: parameters that are trained, or this rank's shards of them.
        present_bytes: What of `beside_bytes` is allocated already.
        gathered_bytes: The most that gathered parameters take at once, flat copies of them included; part of `beside_bytes`.
    """

    beside_bytes: int
    step_bytes: int
    trainable_bytes: int
    present_bytes: int = 0
    gathered_bytes: int = 0

    @property
    def coming_bytes(self) -> int:
        """What is still to be allocated."""
        return max(0, self.beside_bytes - self.present_bytes)


NOTHING_HELD = Held(0, 0, 0)
"""Where there is no wrapper."""


def is_wrapped() -> bool:
    """Whether the model whose forward runs now is under DDP or FSDP2."""
    is_started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_started and (running_ddp() is not None or running_fsdp() is not None)


def held_by(model: nn.Module) -> Held | None:
    """What a model's wrapper holds; None where it is under neither DDP nor FSDP2."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return held_by_ddp_of(model)
    tree = fsdp_tree(model)
    return None if tree is None else held_by_fsdp(tree)


def held_by_running() -> Held | None:
    """The same of the model whose forward runs now, in which a graph is compiled."""
    ddp = running_ddp()
    if ddp is not None:
        return held_by_ddp_of(ddp)
    try:
        tree = running_fsdp()
    except AttributeError as error:
        warn(f"what FSDP2 holds beside the graphs is not known on torch {torch.__version__} ({error})")
        return None
    return None if tree is None else held_by_fsdp(tree)


def held_by_ddp_of(model: nn.Module) -> Held:
    """What DDP holds of a model, wrapped or not yet."""
    trained = [p for p in model.parameters() if p.requires_grad]
    nbytes = sum(map(local_nbytes, trained))
    # The host counts what is resident, which fresh buckets are not before the first backward has written into them.
    is_fresh = all(p.device.type == "cpu" and p.grad is None for p in trained)
    return Held(nbytes, 2 * nbytes, nbytes, 0 if is_fresh else nbytes)


def held_by_fsdp(tree: FsdpTree) -> Held:
    """What FSDP2 holds in a step that runs its groups one by one."""
    groups = [group for group in tree.groups if group.gathered_bytes]
    moments = list(fsdp_moments(groups, [k for k, group in enumerate(groups) if not group.is_outer]))
    present_bytes = tree.flat_bytes + sum(group.gathered_bytes for group in groups if group.is_gathered)
    beside_bytes = max((m.beside_bytes for m in moments), default=0)
    step_bytes = max((m.beside_bytes + m.gradient_bytes for m in moments), default=0)
    forward = (m.beside_bytes for m in moments if m.at in (At.GATHER, At.COPY_OUT, At.FORWARD))
    return Held(beside_bytes, step_bytes, tree.trainable_bytes, present_bytes, max(forward, default=0))
