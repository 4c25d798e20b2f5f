"""The liveness of a plan's backward, walked event by event: a slow, plain reference without code of the passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from compile_remat.passes.problem.problem import (
    EXTERN,
    ITEM,
    POINTWISE,
    REDUCTION,
    Problem,
    Step,
    Value,
)
from tests.oracles.slow_forward import slow_forward_peak


@dataclass(frozen=True)
class SlowRun:
    """Kernels, live bytes, values and time of one plan, by the slow walk."""

    kernels: tuple[str, ...]
    live_bytes: tuple[int, ...]
    forward_peak_bytes: int
    saved: frozenset[int]
    recomputed: frozenset[int]
    time_ns: int

    @property
    def peak_bytes(self) -> int:
        """The most of forward and backward."""
        return max(self.forward_peak_bytes, *self.live_bytes)


@dataclass(frozen=True)
class _Event:
    """One node of the backward that runs: a value once more, or a step."""

    is_step: bool
    index: int


@dataclass
class _Buffer:
    nbytes: int
    last_slot: int
    may_be_overwritten: bool


def slow_run(problem: Problem, saved: Iterable[int]) -> SlowRun:
    """Walk the plan that saves `saved`."""
    walk = _Walk(problem, frozenset(saved))
    live = tuple(walk.live_bytes())
    used = frozenset(walk.used)
    recomputed = frozenset(e.index for e in walk.events if not e.is_step)
    values = problem.values
    return SlowRun(
        kernels=tuple(problem.steps[e.index].name if e.is_step else values[e.index].name for e in walk.events),
        live_bytes=live,
        forward_peak_bytes=slow_forward_peak(problem, used),
        saved=used,
        recomputed=recomputed,
        time_ns=sum(values[v].time_ns for v in recomputed) + sum(values[v].save_time_ns for v in used),
    )


@dataclass
class _Walk:
    """The backward of one plan.

    The order is that of torch's ``reordering_to_mimic_autograd_engine``: go through the joint graph from the first
    backward node on, and put in front of each node the ancestors that are still missing, in graph order.
    """

    problem: Problem
    saved: frozenset[int]
    events: list[_Event] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        needed = self._needed()
        self.used = needed & self.saved
        done: set[int] = set()
        for b, step in enumerate(self.problem.steps):
            late = [v for v in sorted(needed - self.used) if self.problem.values[v].late_step == b]
            for v in late:
                self._emit([v], done)
            self._emit(step.reads, done)
            self.events.append(_Event(True, b))
        self.slot = {event: k for k, event in enumerate(self.events)}
        self.again = done
        self.readers: dict[_Event, list[_Event]] = {e: [] for e in self.events}
        self.readers |= {_Event(False, v): [] for v in self.used}
        for event in self.events:
            for source in self._sources(event):
                self.readers[source].append(event)

    def _needed(self) -> set[int]:
        needed: set[int] = set()
        pending = [v for s in self.problem.steps for v in s.reads]
        while pending:
            v = pending.pop()
            if v not in needed:
                needed.add(v)
                if v not in self.saved:
                    pending.extend(self.problem.values[v].reads)
        return needed

    def _emit(self, wanted: Iterable[int], done: set[int]) -> None:
        missing: set[int] = set()
        pending = list(wanted)
        while pending:
            v = pending.pop()
            if v not in missing and v not in done and v not in self.saved:
                missing.add(v)
                pending.extend(self.problem.values[v].reads)
        self.events += [_Event(False, v) for v in sorted(missing)]
        done |= missing

    # -- who reads whom, and where ------------------------------------------------------------------------------------

    def _node(self, event: _Event) -> Value | Step:
        return self.problem.steps[event.index] if event.is_step else self.problem.values[event.index]

    def _sources(self, event: _Event) -> list[_Event]:
        node = self._node(event)
        found = [_Event(False, v) for v in node.reads]
        return found + ([_Event(True, g) for g in node.gradients] if isinstance(node, Step) else [])

    def _is_stored(self, event: _Event) -> bool:
        """True if the value that the event computes gets a buffer of its own."""
        node = self._node(event)
        if not node.nbytes:
            return False
        if node.kernel in (EXTERN, REDUCTION, ITEM) or _is_realised(node):
            return True
        if event.is_step and node.is_output:
            return True
        final = len(self.problem.steps) - 1
        for reader in self.readers[event]:
            if self._node(reader).kernel == EXTERN:
                return True
            if not event.is_step and reader == _Event(True, final):
                return True
        return False

    def _in_registers(self, event: _Event) -> bool:
        return self._node(event).kernel == POINTWISE and not self._is_stored(event)

    def _runs_at(self, event: _Event) -> set[int]:
        """The slots at which the event's expression is evaluated: its own, or its readers' if it has no buffer."""
        slots = {self.slot[event]}
        if self._in_registers(event):
            whole = self._written_into(event)
            for reader in self.readers[event]:
                if whole is not None and self.slot[reader] > self.slot[whole]:
                    continue
                if reader != self.events[-1]:
                    slots |= self._runs_at(reader)
        return slots

    def _last_read(self, event: _Event) -> int:
        own = [self.slot[event]] if event in self.slot else []
        return max([s for reader in self.readers[event] for s in self._runs_at(reader)] + own)

    def _written_into(self, event: _Event) -> _Event | None:
        """The concatenation from which later readers read an event that has no buffer of its own."""
        if event.is_step or event not in self.slot or not self._in_registers(event):
            return None
        found = [e for e in self.events if not e.is_step and event.index in self.problem.values[e.index].parts]
        return next((e for e in found if self._has_buffer(e)), None)

    def _last_read_from(self, whole: _Event) -> int:
        """The last slot at which a part of a concatenation that has no buffer of its own is read from it; -1 for none."""
        parts = [e for e in self.events if self._written_into(e) == whole]
        readers = [r for e in parts for r in self.readers[e] if self.slot[r] > self.slot[whole]]
        return max((s for reader in readers for s in self._runs_at(reader)), default=-1)

    def _buffers_read(self, event: _Event) -> set[_Event]:
        """Events whose buffers the kernel of a stored event reads from memory."""
        found: set[_Event] = set()
        for source in self._sources(event):
            if source in self.slot and self._in_registers(source):
                found |= self._buffers_read(source)
            else:
                found.add(source)
        return found

    # -- memory -------------------------------------------------------------------------------------------------------

    def live_bytes(self) -> Iterator[int]:
        """Live bytes while each event runs."""
        values = self.problem.values
        outputs = sum(v.nbytes for v in values if v.is_output)
        alive: dict[_Event, _Buffer] = {}
        for v in self.used:
            if not values[v].is_output:
                event = _Event(False, v)
                alive[event] = _Buffer(values[v].nbytes, self._last_read(event), True)
        for slot, event in enumerate(self.events):
            self._overwrite(event, slot, alive)
            node = self._node(event)
            transient = node.transient_bytes + node.workspace_bytes + node.observed_bytes
            transient += (
                self._copies(slot) + self._copies_beside(slot) - self._spared_copy(event) + self._incoming(slot)
            )
            whole = self._inside(event)
            if self._has_buffer(event) and whole not in alive:
                last = max(self._last_read_from(whole), *(self._last_read(e) for e in self._made_inside(whole)))
                alive[whole] = replace(self._buffer(whole), last_slot=max(last, self._buffer(whole).last_slot))
            for item in self._items(event):
                if item in self.slot:
                    if self._node(item).nbytes:
                        alive[item] = self._buffer(item)
                else:
                    transient += self._node(item).nbytes
            yield outputs + transient + sum(b.nbytes for b in alive.values())
            for other in [e for e, b in alive.items() if b.last_slot <= slot]:
                del alive[other]

    def _incoming(self, slot: int) -> int:
        """Gradients of outputs that the backward reads too, as long as steps read them."""
        read = [(v, self.problem.values[v].gradient_readers) for v in self.used]
        ends = {v: max(s for b in steps for s in self._runs_at(_Event(True, b))) for v, steps in read if steps}
        return sum(self.problem.values[v].nbytes for v, end in ends.items() if slot <= end)

    def _spared_copy(self, event: _Event) -> int:
        """The copy that no reader gets: the order is known, and a step alone reads the concatenation."""
        return self._node(event).nbytes if self._is_in_order(event) else 0

    def _is_in_order(self, event: _Event) -> bool:
        node = self._node(event)
        if not isinstance(node, Value) or not set(node.ordered_by) & set(self.used):
            return False
        return all(reader.is_step for reader in self._copying(event))

    def _copying(self, event: _Event) -> list[_Event]:
        """The events that get a copy of a concatenation, in the order in which they run."""
        return [] if event.is_step else [e for e in self.events if event.index in self._node(e).copies]

    def _copies_beside(self, slot: int) -> int:
        """Bytes of copies of concatenations that are still alive, for another copy or for a part that is made in them."""
        total, reader = 0, self.events[slot]
        for event in self.events:
            copying = self._copying(event)
            if reader in copying and not self._is_in_order(event):
                parts = [e for e in self._made_inside(event) if e != event]
                ends = [self._last_read_from(event), *(self._last_read(e) for e in parts)]
                if reader != copying[-1] or slot <= max(ends):
                    total += self._node(event).nbytes
        return total

    def _inside(self, event: _Event) -> _Event:
        """The concatenation whose buffer a value is a place in, both being computed again; else the value itself."""
        if event.is_step:
            return event
        found = [e for e in self.events if not e.is_step and event.index in self.problem.values[e.index].parts]
        return next((e for e in found if self._has_buffer(e) and self._has_buffer(event)), event)

    def _has_buffer(self, event: _Event) -> bool:
        return self._is_stored(event) and not self._is_item(event)

    def _made_inside(self, event: _Event) -> list[_Event]:
        """The places of a concatenation that are made in it, itself among them."""
        return [e for e in self.events if self._inside(e) == event]

    def _copies(self, slot: int) -> int:
        """Copies of inputs that a step, or a value computed once more, still reads."""
        return sum(
            self._node(e).held_bytes for e in self.events if self._node(e).held_bytes and slot <= max(self._runs_at(e))
        )

    def _buffer(self, event: _Event) -> _Buffer:
        node = self._node(event)
        if isinstance(node, Step) and node.is_output:
            return _Buffer(node.nbytes, len(self.events), False)
        return _Buffer(node.nbytes, self._last_read(event), not node.is_output)

    def _is_item(self, event: _Event) -> bool:
        return self._node(event).kernel == ITEM and bool(self._sources(event))

    def _items(self, event: _Event) -> list[_Event]:
        """The parts of a node with several outputs: they come into being with it."""
        nodes: tuple[Value, ...] | tuple[Step, ...] = self.problem.steps if event.is_step else self.problem.values
        found = [_Event(event.is_step, i) for i, n in enumerate(nodes) if n.kernel == ITEM]
        return [item for item in found if event in self._sources(item)]

    def _overwrite(self, event: _Event, slot: int, alive: dict[_Event, _Buffer]) -> None:
        """A pointwise kernel writes over one buffer of its size that it is the last to read."""
        node = self._node(event)
        if node.kernel != POINTWISE or not self._has_buffer(event) or self._inside(event) != event:
            return
        for source in sorted(self._buffers_read(event), key=lambda e: (e.is_step, e.index)):
            buffer = alive.get(source)
            fits = (
                buffer and buffer.nbytes == node.nbytes and self._node(source).is_channels_last == node.is_channels_last
            )
            if buffer and buffer.may_be_overwritten and buffer.last_slot == slot and fits:
                del alive[source]
                return


def _is_realised(node: Value | Step) -> bool:
    """True if a node of the backward has a buffer although it is pointwise."""
    return node.is_realised_again if isinstance(node, Value) else node.realised
