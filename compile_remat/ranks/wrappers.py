"""Bytes that DDP and FSDP2 hold beside the compiled graphs: reduce buckets, gathered parameters, and gradients being reduced.

    DDP     buckets = bytes of the gradients, from the construction of the wrapper on; with ``gradient_as_bucket_view`` they hold
            the gradients after the backward; until then the gradients that a graph returns lie beside the buckets

    FSDP2   the bytes that `fsdp_moments` counts, moment by moment

NCCL's own buffers are in none of torch's allocators and are not counted.
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
    """Bytes that a wrapper holds on one rank.

    Attributes:
        beside_bytes: Peak bytes of the wrapper beside graphs, without the gradients that graphs make.
        step_bytes: Peak bytes of a step whose graphs hold only the gradients that they make.
        trainable_bytes: Bytes of the parameters that the optimizer steps: trained parameters, or this rank's shards of them.
        present_bytes: The part of `beside_bytes` that is allocated already.
        gathered_bytes: Peak bytes of gathered parameters, their flat copies included; part of `beside_bytes`.
    """

    beside_bytes: int
    step_bytes: int
    trainable_bytes: int
    present_bytes: int = 0
    gathered_bytes: int = 0

    @property
    def coming_bytes(self) -> int:
        """The part of `beside_bytes` that is still to be allocated."""
        return max(0, self.beside_bytes - self.present_bytes)


NOTHING_HELD = Held(0, 0, 0)
"""The bytes of a model without a wrapper."""


def is_wrapped() -> bool:
    """Returns whether the model whose forward runs now is under DDP or FSDP2."""
    is_started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_started and (running_ddp() is not None or running_fsdp() is not None)


def held_by(model: nn.Module) -> Held | None:
    """Returns the bytes that a model's wrapper holds; None if the model is under neither DDP nor FSDP2."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return held_by_ddp_of(model)
    tree = fsdp_tree(model)
    return None if tree is None else held_by_fsdp(tree)


def held_by_running() -> Held | None:
    """Returns the bytes that the wrapper of the model whose forward runs now holds.

    None if there is no wrapper, and, with a warning, if FSDP2's state cannot be read on this torch.
    """
    ddp = running_ddp()
    if ddp is not None:
        return held_by_ddp_of(ddp)
    try:
        tree = running_fsdp()
    except AttributeError as error:
        warn(
            f"the bytes that FSDP2 holds beside the graphs are not known on torch {torch.__version__} and not counted ({error})"
        )
        return None
    return None if tree is None else held_by_fsdp(tree)


def held_by_ddp_of(model: nn.Module) -> Held:
    """Returns the bytes that DDP holds for a model, which need not be wrapped yet."""
    trained = [p for p in model.parameters() if p.requires_grad]
    nbytes = sum(map(local_nbytes, trained))
    # The host's free memory counts resident pages, and fresh buckets have none until the first backward writes into them.
    is_fresh = all(p.device.type == "cpu" and p.grad is None for p in trained)
    return Held(nbytes, 2 * nbytes, nbytes, 0 if is_fresh else nbytes)


def held_by_fsdp(tree: FsdpTree) -> Held:
    """Returns the bytes that FSDP2 holds in a step that runs its groups one by one."""
    groups = [group for group in tree.groups if group.gathered_bytes]
    moments = list(fsdp_moments(groups, [k for k, group in enumerate(groups) if not group.is_outer]))
    present_bytes = tree.flat_bytes + sum(group.gathered_bytes for group in groups if group.is_gathered)
    beside_bytes = max((m.beside_bytes for m in moments), default=0)
    step_bytes = max((m.beside_bytes + m.gradient_bytes for m in moments), default=0)
    forward = (m.beside_bytes for m in moments if m.at in (At.GATHER, At.COPY_OUT, At.FORWARD))
    return Held(beside_bytes, step_bytes, tree.trainable_bytes, present_bytes, max(forward, default=0))
