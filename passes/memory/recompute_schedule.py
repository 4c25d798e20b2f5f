"""The slots at which plans recompute values: torch's order of the backward, for many plans at once.

The rule is that of torch's ``reordering_to_mimic_autograd_engine``: a value is recomputed just before its first reader, after the
value's missing ancestors, in graph order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.buffers import Bools
from compile_remat.passes.problem.problem import Step, Value

NEVER = np.int32(1 << 30)
"""Larger than every anchor and slot: the anchor of a value that the backward does not compute, the end of an unfreed buffer."""


@dataclass(frozen=True)
class Schedule:
    """The backward of P plans: each node that runs has a slot.

    Attributes:
        used: True for a value that is saved and read in the backward, [values, P].
        recomputed: True for a value that the backward recomputes, [values, P].
        slots: Slot of each recomputed value, [values, P]; undefined for other values.
        step_slots: Slot of each step, [P, steps].
        length: Number of slots of the longest backward.
    """

    used: Bools
    recomputed: Bools
    slots: NDArray[np.int32]
    step_slots: NDArray[np.int32]
    length: int


class RecomputeSchedule:
    """Schedules of one problem's plans.

    An *anchor* is a place in the order that torch's reordering walks over: a step, or a value that stands among the steps in the
    joint graph (`Value.late_step`).

    Attributes:
        first_anchor: The anchor of the first step that reads each value, [values]; NEVER for none.
        late_anchor: The anchor of each value that stands among the steps, [values]; NEVER for the other values.
        step_anchor: The anchor of each step, [steps].
        earliest: The anchor before which no plan recomputes the value, [values]; NEVER if no plan recomputes it.
        latest_step: The step before which every plan that recomputes a value has done so, [values]; -1 for none.
    """

    def __init__(self, values: Sequence[Value], steps: Sequence[Step], readers: Sequence[Sequence[int]]) -> None:
        self.readers, self.num_steps = readers, len(steps)
        self._number_anchors(values)
        first_anchor = [int(NEVER)] * len(values)
        for anchor, step in zip(self.step_anchor.tolist(), steps, strict=True):
            for v in step.reads:
                first_anchor[v] = min(first_anchor[v], anchor)
        self.first_anchor = np.array(first_anchor, dtype=np.int32)
        is_read = (self.first_anchor < NEVER).tolist()
        self._backwards = [(v, (is_read[v], readers[v])) for v in reversed(range(len(values)))]
        self._bound()

    def _bound(self) -> None:
        """Sets `earliest` and `latest_step`, and lists the readers that move a value to an earlier anchor in some plan."""
        first, late, never = self.first_anchor.tolist(), self.late_anchor.tolist(), int(NEVER)
        earliest = np.minimum(self.first_anchor, self.late_anchor).tolist()
        latest = [anchor if anchor < never else -1 for anchor in first]
        self._walk: list[tuple[int, list[int], bool]] = []
        for v in range(len(first) - 1, -1, -1):
            moving = []
            for w in self.readers[v]:
                earliest[v], latest[v] = min(earliest[v], earliest[w]), max(latest[v], latest[w])
                if earliest[w] < first[v]:
                    moving.append(w)
            self._walk.append((v, moving, late[v] < never))
        self.earliest = np.array(earliest, dtype=np.int64)
        self.latest_step = np.append(self.anchor_step, np.int32(-1))[latest]

    def _number_anchors(self, values: Sequence[Value]) -> None:
        """Numbers the anchors in the joint graph's order."""
        late = [(value.late_step, 0, v) for v, value in enumerate(values) if value.late_step >= 0]
        walk = sorted(late + [(b, 1, b) for b in range(self.num_steps)])
        self.late_anchor = np.full(len(values), NEVER, dtype=np.int32)
        self.step_anchor = np.empty(self.num_steps, dtype=np.int32)
        for anchor, (_, is_step, index) in enumerate(walk):
            (self.step_anchor if is_step else self.late_anchor)[index] = anchor
        self.anchor_step = np.array([b for b, _, _ in walk], dtype=np.int32)

    def of(self, saved: Bools) -> Schedule:
        """The schedule of the plans in the columns of `saved`, [values, P]."""
        start, recomputed = self._starts(saved)
        slots, step_slots, length = self._slots(start, recomputed)
        return Schedule(saved & (start < NEVER), recomputed, slots, step_slots, length)

    def needs(self, saved: Bools) -> tuple[Bools, Bools]:
        """Masks of the saved values that the backward reads, and of the values that it recomputes, both [values, P]."""
        count, plans = saved.shape
        rows = np.packbits(saved, axis=1)
        width, packed = rows.shape[1], rows.tobytes()
        everywhere, nothing = (1 << 8 * width) - 1, bytes(width)  # a bit for each plan
        needed, recomputed = [nothing] * count, [0] * count
        for v, (is_read, readers) in self._backwards:
            wanted = everywhere if is_read else 0
            if not wanted:
                for w in readers:
                    wanted |= recomputed[w]
            if wanted:
                needed[v] = wanted.to_bytes(width)
                recomputed[v] = wanted & ~int.from_bytes(packed[v * width : (v + 1) * width])
        bits = np.frombuffer(b"".join(needed), dtype=np.uint8).reshape(count, width)
        return _unpacked(bits & rows, plans), _unpacked(bits & ~rows, plans)

    def _starts(self, saved: Bools) -> tuple[NDArray[np.int32], Bools]:
        """The anchor before which each value is recomputed, if at all, and the mask of the recomputed values, both [values, P]."""
        plans = saved.shape[1]
        start = np.repeat(self.first_anchor[:, None], plans, axis=1)
        rows = list(start)
        reach = rows.copy()  # the anchor before which a value needs its inputs
        hidden = list(np.where(saved, NEVER, np.int32(0)))  # a saved value needs no inputs
        is_saved = np.any(saved, axis=1).tolist()
        for v, readers, is_late in self._walk:
            row = rows[v]
            for w in readers:
                np.minimum(row, reach[w], out=row)
            if is_late:
                np.minimum(row, self.late_anchor[v], out=row, where=row < NEVER)
            if is_saved[v]:
                reach[v] = np.maximum(row, hidden[v])
        return start, (start < NEVER) & ~saved

    def _slots(self, start: NDArray[np.int32], recomputed: Bools) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Slots of values, [values, P], slots of steps, [P, steps], and the number of slots of the longest backward."""
        among = np.flatnonzero(recomputed.any(axis=1))  # plans of one batch are much alike
        n, plans = len(among), start.shape[1]
        m = self.num_steps
        last = len(self.anchor_step) - 1
        key = np.where(recomputed[among], start[among], last + 1).T
        small = np.int16 if last < np.iinfo(np.int16).max else np.int32  # numpy sorts 16 bits by radix
        order = np.argsort(key.astype(small, order="C"), axis=1, kind="stable")
        burst = np.append(self.anchor_step, np.int32(m))[key]  # [P, n]: the step that follows
        ranks = np.empty((plans, n), dtype=np.int32)
        places = order + np.arange(plans)[:, None] * n
        ranks.reshape(-1)[places.reshape(-1)] = np.broadcast_to(np.arange(n, dtype=np.int32), (plans, n)).reshape(-1)
        flat = (burst + np.arange(plans)[:, None] * (m + 1)).ravel()
        counts = np.bincount(flat, minlength=plans * (m + 1)).reshape(plans, m + 1)[:, :m]
        step_slots = (np.cumsum(counts, axis=1) + np.arange(m)).astype(np.int32)
        length = int(step_slots[:, -1].max()) + 1 if m else 0
        slots = np.zeros(start.shape, dtype=np.int32)
        slots[among] = (ranks + burst).T
        return slots, step_slots, length


def _unpacked(rows: NDArray[np.uint8], plans: int) -> Bools:
    """Unpacks rows of bits to a mask [rows, plans]."""
    return np.unpackbits(rows, axis=1, count=plans).view(bool)
