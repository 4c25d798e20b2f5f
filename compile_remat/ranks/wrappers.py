"""What DDP and FSDP2 hold beside the compiled graphs: reduce buckets, gathered parameters, and gradients on their way.

    DDP     buckets = bytes of the gradients, from the construction of the wrapper on; with ``gradient_as_bucket_view`` they are
            what is left of the gradients after the backward, and lie beside those that a graph returns until then

    FSDP2   U = gathered parameters of a group, R = its gradients in the type that is reduced, S = this rank's part of the gradients
            forward of group k     what stays gathered + U(k) + U(k), flat, until the next group has been gathered
            backward of group k    what stays gathered + U(k) + U(k-1), flat, gathered ahead + R(k+1) + S(k+1) + S(k+2) + ...

The moments between two graphs are counted as well: a group is gathered flat and then copied out, while the flat copy of the group
before it is still held; gradients are copied to the input of a reduce-scatter while they are there.  What NCCL and gloo take for
themselves is in none of torch's allocators and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from compile_remat._torch.ranks.wrappers import FsdpGroup, FsdpTree, fsdp_tree, local_nbytes, running_ddp, running_fsdp
from compile_remat.errors import warn


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
    """What FSDP2 holds."""
    moments = list(fsdp_moments(tree.groups))
    present_bytes = tree.flat_bytes + sum(group.gathered_bytes for group in tree.groups if group.is_gathered)
    beside_bytes = max((beside for beside, _ in moments), default=0)
    step_bytes = max((beside + gradients for beside, gradients in moments), default=0)
    gathered_bytes = max(_gathered_moments(tree.groups), default=0)
    return Held(beside_bytes, step_bytes, tree.trainable_bytes, present_bytes, gathered_bytes)


def fsdp_moments(groups: Sequence[FsdpGroup]) -> Iterator[tuple[int, int]]:
    """What FSDP2 holds at each moment of a step, beside graphs, and the gradients that graphs have made for it by then, in bytes.

    Args:
        groups: In the order of the forward.
    """
    yield from ((gathered, 0) for gathered in _gathered_moments(groups))
    outer, inner = _outer_and_inner(groups)
    kept = sum(group.gathered_bytes for group in groups if group.is_outer or group.stays)
    waiting = shards = 0
    for k, group in reversed(list(enumerate(inner))):
        ahead = 0 if k == 0 or inner[k - 1].stays else inner[k - 1].gathered_bytes
        kept -= group.gathered_bytes * group.stays
        if not group.stays:
            yield kept + 2 * group.gathered_bytes + waiting + shards, 0
        yield kept + group.gathered_bytes + ahead + waiting + shards, group.gradient_bytes
        yield kept + ahead + _reducing_bytes(group) + shards, group.gradient_bytes
        waiting, shards = group.reduced_bytes, shards + group.shard_bytes
    for group in outer:
        kept -= group.gathered_bytes
        yield kept + _reducing_bytes(group) + shards, group.gradient_bytes
        shards += group.shard_bytes


def _gathered_moments(groups: Sequence[FsdpGroup]) -> Iterator[int]:
    """What is gathered at each moment of the forward."""
    outer, inner = _outer_and_inner(groups)
    kept = sum(group.gathered_bytes for group in outer)
    yield from (kept + group.gathered_bytes for group in outer)  # flat beside gathered
    flat = max((group.gathered_bytes for group in outer), default=0)
    for group in inner:
        yield kept + flat + 2 * group.gathered_bytes
        flat = group.gathered_bytes
        kept += group.gathered_bytes * group.stays


def _outer_and_inner(groups: Sequence[FsdpGroup]) -> tuple[list[FsdpGroup], list[FsdpGroup]]:
    used = [group for group in groups if group.gathered_bytes]
    return [group for group in used if group.is_outer], [group for group in used if not group.is_outer]


def _reducing_bytes(group: FsdpGroup) -> int:
    return group.reduced_bytes + group.cast_bytes + group.output_bytes
