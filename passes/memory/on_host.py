"""Live bytes of a plan whose saved values wait on the host between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_remat.passes.memory.buffers import Ints
from compile_remat.passes.memory.candidate_plan import Candidate
from compile_remat.passes.memory.step_curve import curve_of
from compile_remat.passes.problem.plan import Offloaded


@dataclass(frozen=True)
class OnHost:
    """A saved value's absence from the device.

    Attributes:
        release: The first place of the forward at which the buffer is free; the number of places for the forward's end.
        fetch: The first slot of the backward at which the buffer takes memory again.
    """

    name: str
    nbytes: int
    release: int
    fetch: int


@dataclass(frozen=True)
class LiveOnDevice:
    """Live bytes along the step of one plan.

    Attributes:
        forward: At each place, and at the forward's end, [places + 1].
        backward: At each slot, [slots].
        absent: The values that wait on the host.
    """

    forward: Ints
    backward: Ints
    absent: tuple[OnHost, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once."""
        return max(int(self.forward.max(initial=0)), int(self.backward.max(initial=0)))


def live_on_device(found: Candidate, offloaded: Sequence[Offloaded]) -> LiveOnDevice:
    """Live bytes of a plan that moves some of its saved values to the host.

    Args:
        found: The plan with all values kept.

    Raises:
        ValueError: A value has no buffer of its own that could leave.
    """
    simulator, batch = found.simulator, found.batch
    forward = simulator.forward.live(simulator.forward.lifetimes(batch.used, batch.recomputed))[0].copy()
    backward = batch.live[0, : int(batch.step_slots[0, -1]) + 1].copy()
    absent = _absent(found, offloaded) if offloaded else ()
    for each in absent:
        forward[each.release :] -= each.nbytes
        backward[: each.fetch] -= each.nbytes
    return LiveOnDevice(forward, backward, absent)


def _absent(found: Candidate, offloaded: Sequence[Offloaded]) -> tuple[OnHost, ...]:
    curve = curve_of(found)
    places = {name: place for place, name in enumerate(curve.places) if name}
    slots = {name: slot for slot, name in enumerate(curve.slots)}
    movable = {each.name: each for each in curve.movable}
    absent = []
    for each in offloaded:
        buffer = movable.get(each.name)
        if buffer is None:
            raise ValueError(f"the plan offloads {each.name!r}, which has no buffer of its own")
        release = places.get(each.release_before, len(curve.places))
        fetch = min(slots.get(each.fetch_before, buffer.first_read), buffer.first_read)
        absent.append(OnHost(each.name, buffer.nbytes, release, fetch))
    return tuple(absent)
