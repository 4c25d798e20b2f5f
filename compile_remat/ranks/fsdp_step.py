"""Bytes that FSDP2 holds at each moment of a step, beside the graphs that it runs around.

U: bytes of a group's gathered parameters.  R: bytes of its gradients in the dtype in which they are reduced.  S: bytes of a rank's
shard of its gradients.  N: the number of ranks.  In the order of torch's ``torch/distributed/fsdp/_fully_shard`` (2.13):

    gather     ``FSDPParamGroup.unshard``: the collective writes U as a flat buffer.  This rank's shards are cast first if the
               forward has another dtype (``_get_param_all_gather_inputs``: U/N), and gloo works on a copy of its result
    copy out   ``wait_for_unshard``: U is allocated again, as parameters.  In the forward, the flat U of the previous group is held
               until then, and the flat U of this group until the next copy or the end of the model's forward
               (``FSDPCommContext.all_gather_state``); in the backward it is freed at once
    forward    ``FSDPState._pre_forward`` to ``_post_forward``, which frees U unless the group stays gathered
    ahead      ``_backward_prefetch``: before a backward runs, the group that ran before it in the forward is gathered, flat
    backward   runs beside this flat U, and beside the R of the group reduced before: ``reduce_scatter_states`` holds one R
    copy in    ``post_backward``: U is freed, then the R of the group reduced before; R is allocated beside the gradients
    reduce     ``foreach_reduce``: the gradients are freed, except for that of the last parameter, which a loop variable still
               holds; the result, R/N, is held beside R, and gloo works on a copy of R
    cast back  S, the result in the dtype of the parameters, is held beside the result if the dtypes differ; S stays

Parameters outside of blocks belong to an outer group: they stay gathered around all blocks and are reduced after all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from compile_remat._torch.ranks.wrappers import FsdpGroup


class At(StrEnum):
    """A kind of moment; see the module's table."""

    GATHER = "gather"
    COPY_OUT = "copy out"
    FORWARD = "forward"
    GATHER_AGAIN = "gather again"
    COPY_OUT_AGAIN = "copy out again"
    AHEAD = "gather ahead"
    BACKWARD = "backward"
    COPY_IN = "copy in"
    REDUCE = "reduce"
    CAST_BACK = "cast back"


@dataclass(frozen=True)
class FsdpMoment:
    """Bytes that FSDP2 holds at one moment.

    Attributes:
        at: Kind of the moment.
        place: Index of `places` at which the moment is; their number for an outer group when it is reduced.
        beside_bytes: Bytes of FSDP2's own buffers.
        gradient_bytes: Bytes of the group's gradients that a graph makes in this backward, or has made and FSDP2 still holds.
    """

    at: At
    place: int
    beside_bytes: int
    gradient_bytes: int = 0


@dataclass
class _Held:
    """Buffers that FSDP2 has allocated now.

    Attributes:
        kept_bytes: Gathered parameters.
        flat_bytes: The flat U of the group gathered last, in the forward.
        ahead: The group that is gathered ahead, flat; None if there is none.
        waiting_bytes: The R of the group reduced last.
        shard_bytes: This rank's shards of gradients.
        gathered: The groups counted in `kept_bytes`.
        reduced: The groups counted in `shard_bytes`.
    """

    kept_bytes: int = 0
    flat_bytes: int = 0
    ahead: int | None = None
    waiting_bytes: int = 0
    shard_bytes: int = 0
    gathered: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)


def fsdp_moments(groups: Sequence[FsdpGroup], places: Sequence[int | None]) -> Iterator[FsdpMoment]:
    """Yields all moments of a step, in order.

    Args:
        groups: The model's groups; groups outside of blocks are marked `is_outer`.
        places: The runs in the order of the forward: the number of a block's group, or None for code between blocks.
    """
    step = _Step(groups, places)
    yield from step.forward()
    yield from step.backward()


class _Step:
    def __init__(self, groups: Sequence[FsdpGroup], places: Sequence[int | None]) -> None:
        self.groups, self.places = groups, places
        self.outer = [k for k, group in enumerate(groups) if group.is_outer and group.gathered_bytes]
        self.held = _Held()

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self) -> Iterator[FsdpMoment]:
        held = self.held
        for k in self.outer:
            yield from self._gathered(k, 0, At.GATHER, At.COPY_OUT)
            held.flat_bytes = self.groups[k].gathered_bytes
        for place, inner in enumerate(self.places):
            if inner is not None and inner not in held.gathered:
                yield from self._gathered(inner, place, At.GATHER, At.COPY_OUT)
                held.flat_bytes = self.groups[inner].gathered_bytes
            yield FsdpMoment(At.FORWARD, place, held.kept_bytes + held.flat_bytes)
            if inner is not None and not self.groups[inner].stays:
                self._free(inner)
        held.flat_bytes = 0
        for k in self.outer:
            if not self.groups[k].stays:
                self._free(k)

    def _gathered(self, k: int, place: int, gather: At, copy_out: At) -> Iterator[FsdpMoment]:
        """Gather a group's parameters, which then count as allocated; the flat buffer does not."""
        held, group = self.held, self.groups[k]
        before = held.kept_bytes + held.flat_bytes + held.waiting_bytes + held.shard_bytes
        yield FsdpMoment(gather, place, before + self._ahead_bytes() + _gathering_bytes(group))
        yield FsdpMoment(copy_out, place, before + self._ahead_bytes() + 2 * group.gathered_bytes)
        held.gathered.add(k)
        held.kept_bytes += group.gathered_bytes

    def _free(self, k: int) -> None:
        if k in self.held.gathered:
            self.held.gathered.remove(k)
            self.held.kept_bytes -= self.groups[k].gathered_bytes

    def _ahead_bytes(self) -> int:
        return 0 if self.held.ahead is None else self.groups[self.held.ahead].gathered_bytes

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self) -> Iterator[FsdpMoment]:
        held, last = self.held, len(self.places) - 1
        for k in self.outer:
            if k not in held.gathered:
                yield from self._gathered(k, last, At.GATHER_AGAIN, At.COPY_OUT_AGAIN)
        if self.outer:
            yield from self._gathered_ahead(last, len(self.places))
        for place in reversed(range(len(self.places))):
            inner = self.places[place]
            if inner is None:
                yield FsdpMoment(At.BACKWARD, place, self._in_backward())
                continue
            yield from self._with_parameters(inner, place)
            yield from self._gathered_ahead(place, place)
            yield FsdpMoment(At.BACKWARD, place, self._in_backward(), self.groups[inner].gradient_bytes)
            self._free(inner)
            yield from self._reduced(inner, place)
        for k in self.outer:
            self._free(k)
            yield from self._reduced(k, len(self.places))

    def _with_parameters(self, k: int, place: int) -> Iterator[FsdpMoment]:
        held = self.held
        if k in held.gathered:
            return
        if held.ahead != k:
            yield from self._gathered(k, place, At.GATHER_AGAIN, At.COPY_OUT_AGAIN)
            return
        yield FsdpMoment(At.COPY_OUT_AGAIN, place, self._in_backward() + self.groups[k].gathered_bytes)
        held.ahead = None
        held.gathered.add(k)
        held.kept_bytes += self.groups[k].gathered_bytes

    def _gathered_ahead(self, place: int, before: int) -> Iterator[FsdpMoment]:
        """Gather the last group at a place before `before`, unless it is gathered already."""
        k = next((k for k in reversed(self.places[:before]) if k is not None), None)
        if k is None or k in self.held.gathered or k == self.held.ahead:
            return
        yield FsdpMoment(At.AHEAD, place, self._in_backward() + _gathering_bytes(self.groups[k]))
        self.held.ahead = k

    def _in_backward(self) -> int:
        held = self.held
        return held.kept_bytes + self._ahead_bytes() + held.waiting_bytes + held.shard_bytes

    def _reduced(self, k: int, place: int) -> Iterator[FsdpMoment]:
        held, group = self.held, self.groups[k]
        held.waiting_bytes = 0
        beside = self._in_backward() + group.reduced_bytes
        if group.reduced_bytes:
            yield FsdpMoment(At.COPY_IN, place, beside + group.cast_bytes, group.gradient_bytes)
            reducing = beside + group.output_bytes + group.reduce_copy_bytes
            yield FsdpMoment(At.REDUCE, place, reducing, group.last_gradient_bytes)
            if group.shard_bytes != group.output_bytes:
                casting = beside + group.output_bytes + group.shard_bytes
                yield FsdpMoment(At.CAST_BACK, place, casting, group.last_gradient_bytes)
        held.waiting_bytes = group.reduced_bytes
        held.shard_bytes += 0 if k in held.reduced else group.shard_bytes
        held.reduced.add(k)


def _gathering_bytes(group: FsdpGroup) -> int:
    return group.gathered_bytes + group.gather_cast_bytes + group.gather_copy_bytes
