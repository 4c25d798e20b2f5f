"""Slow, plain references that the planner is checked against, and random problems to check it on.

Nothing here shares code with the passes: the liveness of a plan is walked event by event, the best plan is found by
trying all of them or by HiGHS, the cut is networkx's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import (
    CONSTANT,
    EXTERN,
    FREE,
    ITEM,
    POINTWISE,
    RECOMPUTE,
    REDUCTION,
    SAVE,
    Problem,
    Step,
    Value,
)

# -- liveness, event by event -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowRun:
    """What one plan does, by the slow walk."""

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
        """Whether what the event makes gets a buffer of its own."""
        node = self._node(event)
        if not node.nbytes:
            return False
        if node.kernel in (EXTERN, REDUCTION, ITEM) or node.realised:
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
        is_inside = event in self.slot and self._stays_in_its_kernel(event)
        return self._node(event).kernel == POINTWISE and (is_inside or not self._is_stored(event))

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
        """The concatenation that what stands behind it reads an event from, which has no buffer of its own."""
        if event.is_step or event not in self.slot or not self._in_registers(event):
            return None
        found = [e for e in self.events if not e.is_step and event.index in self.problem.values[e.index].parts]
        return next((e for e in found if self._has_buffer(e)), None)

    def _last_read_from(self, whole: _Event) -> int:
        """The last slot at which a part of a concatenation that has no buffer of its own is read from it; -1 for none."""
        parts = [e for e in self.events if self._written_into(e) == whole]
        readers = [r for e in parts for r in self.readers[e] if self.slot[r] > self.slot[whole]]
        return max((s for reader in readers for s in self._runs_at(reader)), default=-1)

    def _may_be_inside(self, event: _Event) -> bool:
        """Whether there is a plan in which the event's expression is computed in its readers' kernel."""
        if self._node(event).kernel != POINTWISE:
            return False
        return not self._is_stored_by_all(event) or self._may_stay_in_its_kernel(event)

    def _is_stored_by_all(self, event: _Event) -> bool:
        if event.is_step:
            return self._is_stored(event)
        node = self._node(event)
        readers = [step for step in self.problem.steps if event.index in step.reads]
        is_read = any(step.kernel == EXTERN or step is self.problem.steps[-1] for step in readers)
        return node.nbytes > 0 and (node.realised or is_read)

    def _read_by_one_node(self, into: _Event) -> set[_Event]:
        """Values that one node alone of a kernel reads: the one that writes, or an inner one of the same bytes."""
        nodes: dict[_Event, set[_Event | None]] = {}
        stack: list[tuple[_Event, _Event | None]] = [(source, into) for source in self._sources(into)]
        while stack:
            source, node = stack.pop()
            if node in nodes.setdefault(source, set()):
                continue
            nodes[source].add(node)
            if self._may_be_inside(source):
                own, written = self._node(source), self._node(into)
                is_alike = own.nbytes == written.nbytes and own.is_channels_last == written.is_channels_last
                inside = node if not own.is_inner or node is None else source if is_alike else None
                stack += [(read, inside) for read in self._sources(source)]
        return {source for source, found in nodes.items() if len(found) == 1 and None not in found}

    def _buffers_read(self, event: _Event, into: Value | Step) -> set[_Event]:
        """What the kernel of a stored event, `into`, reads from memory and might write over."""
        found: set[_Event] = set()
        for source in self._sources(event):
            if source in self.slot and self._in_registers(source):
                node = self._node(source)
                is_alike = node.nbytes == into.nbytes and node.is_channels_last == into.is_channels_last
                found |= self._buffers_read(source, into) if is_alike or not node.is_inner else set()
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
            transient = self._node(event).transient_bytes + self._node(event).workspace_bytes
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

    def _may_stay_in_its_kernel(self, event: _Event) -> bool:
        """Random numbers, or what Inductor computes by a node of its own."""
        node, is_returned = self._node(event), event.index in self.problem.steps[-1].reads
        return isinstance(node, Value) and (node.is_drawn or (node.realised and node.is_inner)) and not is_returned

    def _stays_in_its_kernel(self, event: _Event) -> bool:
        """One of those that nothing reads after the next unfused kernel."""
        between = self.events[self.slot[event] + 1 : self._last_read(event) + 1]
        return self._may_stay_in_its_kernel(event) and all(self._node(e).kernel != EXTERN for e in between)

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
        """Those that get a copy of a concatenation, in the order in which they run."""
        return [] if event.is_step else [e for e in self.events if event.index in self._node(e).copies]

    def _copies_beside(self, slot: int) -> int:
        """Copies of concatenations that are still there, for another copy or for what is made in them."""
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
        return self._is_stored(event) and not self._is_item(event) and not self._stays_in_its_kernel(event)

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
        by_one = self._read_by_one_node(event)
        for source in sorted(self._buffers_read(event, node), key=lambda e: (e.is_step, e.index)):
            buffer = alive.get(source) if source.is_step or source in by_one else None
            fits = (
                buffer and buffer.nbytes == node.nbytes and self._node(source).is_channels_last == node.is_channels_last
            )
            if buffer and buffer.may_be_overwritten and buffer.last_slot == slot and fits:
                del alive[source]
                return


def slow_forward_peak(problem: Problem, used: Iterable[int]) -> int:
    """Most bytes live in the forward.

    A saved value stays to the end, is written over by nobody, and has a buffer from its own place on if it had none: what was
    read for it is not read again for its readers.  A saved value that is no part of the forward is computed behind it: what it
    reads stays until then, until the last that might be saved, and it is written over it where it can be.
    """
    kept = {v for v in used if not problem.values[v].is_output}
    forward = _Forward(problem.values, problem.steps[-1].reads, frozenset(used))
    copies = sum(step.held_bytes for step in problem.steps)
    again = _computed_again(problem, frozenset(used))
    places = range(len(problem.values) + 1)
    held = {
        v: max(places) if v in again else v if forward.is_kernel(v) else forward.last_place(v)
        for v, value in enumerate(problem.values)
        if value.held_bytes
    }
    return copies + max(
        forward.live_bytes(p, kept) + sum(problem.values[v].held_bytes for v, last in held.items() if p <= last)
        for p in places
    )


def _computed_again(problem: Problem, used: Set[int]) -> set[int]:
    """The values that the backward computes once more: what it reads through values that are not saved."""
    found: set[int] = set()
    stack = [v for step in problem.steps for v in step.reads]
    while stack:
        v = stack.pop()
        if v not in used and v not in found:
            found.add(v)
            stack += problem.values[v].reads
    return found


class _Forward:
    """The forward of one plan."""

    def __init__(self, values: tuple[Value, ...], returned: tuple[int, ...], saved: frozenset[int]) -> None:
        self.values, self.size = values, len(values)
        self.returned, self.saved = returned, saved
        self.readers = [[w for w, x in enumerate(values) if v in x.reads and x.in_forward] for v in range(self.size)]
        self.buffers = {v for v in range(self.size) if values[v].in_forward and self._has_buffer(v)}
        writers = sorted(self.buffers | {v for v in saved if values[v].in_forward})
        self.overwritten = {v: w for w in writers if values[w].kernel == POINTWISE for v in self._overwrites(w)}

    def _has_buffer(self, v: int) -> bool:
        node = self.values[v]
        if self._is_drawn_for_readers(v):
            between = self.values[v + 1 : self.last_place(v) + 1]
            return any(w.kernel == EXTERN and w.in_forward for w in between)
        by_kernel = node.kernel in (EXTERN, REDUCTION, ITEM) or node.realised or node.is_output
        return node.nbytes > 0 and (by_kernel or any(self.values[w].kernel == EXTERN for w in self.readers[v]))

    def _is_drawn_for_readers(self, v: int) -> bool:
        return self.values[v].is_drawn and not self.values[v].is_output and v not in self.returned

    def is_kernel(self, v: int) -> bool:
        is_saved = v in self.saved and self.values[v].nbytes > 0
        return is_saved or self.values[v].is_drawn or self.values[v].kernel != POINTWISE or self._has_buffer(v)

    def last_place(self, v: int) -> int:
        if self.values[v].is_output:
            return self.size
        if self._waits(v, set(self.saved)):
            return self._readers_behind(v)[-1]
        return max([v, *(w if self.is_kernel(w) else self.last_place(w) for w in self.readers[v])])

    def _first_place(self, v: int) -> int:
        """The parts of a node with several outputs come into being with it."""
        node = self.values[v]
        return node.reads[0] if node.kernel == ITEM and node.reads else v

    def _reads_from_memory(self, w: int) -> set[int]:
        found: set[int] = set()
        for v in self.values[w].reads:
            found |= {v} if self.is_kernel(v) else self._reads_from_memory(v)
        return found

    def _overwrites(self, w: int) -> list[int]:
        """The one buffer that the kernel of `w` is written over, if any."""
        read = (self._reads_from_memory(w) & self.buffers) - self.saved
        dying = sorted(v for v in read if self.last_place(v) == w and self._is_of_itself(v))
        shape = (self.values[w].nbytes, self.values[w].is_channels_last)
        return [v for v in dying if (self.values[v].nbytes, self.values[v].is_channels_last) == shape][:1]

    def _is_of_itself(self, v: int) -> bool:
        """Whether a buffer is no part of another, nor another a part of it that is read as long."""
        return self._whole_of(v) < 0 and all(self.last_place(u) < self.last_place(v) for u in self._inside(v))

    def _sources_behind(self, w: int) -> set[int]:
        """What is read from memory for a value that is no part of the forward."""
        found: set[int] = set()
        for read in self.values[w].reads:
            v = self._place_of(read, w)
            node = self.values[v]
            if node.in_forward and self._is_written(v) and node.nbytes:
                found |= set() if node.is_output else {v}
            elif not node.in_forward or node.kernel == POINTWISE:
                found |= self._sources_behind(v)
        return found

    def _is_written(self, v: int) -> bool:
        node = self.values[v]
        by_kernel = node.in_forward and (node.kernel in (EXTERN, REDUCTION, ITEM) or node.realised or node.is_output)
        return by_kernel or any(self.values[x].kernel == EXTERN for x in self.readers[v])

    def _place_of(self, v: int, w: int) -> int:
        """Where `w` reads `v`: in the first concatenation before it that was made of it, if it has no buffer of its own."""
        if self.values[v].in_forward and not (self._is_written(v) and self.values[v].nbytes):
            for c in range(w):
                node = self.values[c]
                if v in node.parts and node.in_forward and node.nbytes and self._is_written(c):
                    return c
        return v

    def _readers_behind(self, v: int) -> list[int]:
        behind = [w for w, x in enumerate(self.values) if not x.in_forward and x.is_saveable and x.nbytes]
        return [w for w in behind if v in self._sources_behind(w)]

    def _read_behind(self, v: int, kept: set[int]) -> int:
        """Up to where saved values that are no part of the forward keep the buffer; -1 where none does."""
        if not self._waits(v, kept):
            return -1
        return self.size if self._taken_by(v, kept) in kept else self._readers_behind(v)[-1]

    def _waits(self, v: int, kept: set[int]) -> bool:
        """Whether a buffer stays for what is computed behind the forward; not for what is computed of it alone, if small."""
        readers = set(self._readers_behind(v)) & kept
        with_it = {w for w in readers if self._is_of_one(w, v)}
        is_large = sum(self.values[w].nbytes for w in with_it) > self.values[v].nbytes
        return v not in kept and (readers > with_it or (bool(with_it) and is_large))

    def _is_of_one(self, w: int, v: int) -> bool:
        """Whether a value behind the forward is computed of one pointwise buffer alone."""
        return self.values[v].kernel == POINTWISE and self._sources_behind(w) == {v}

    def _written_at(self, w: int, kept: set[int]) -> int:
        """Where a saved value is written: with the buffer that it is computed of, if that waits for nothing else."""
        draws = [v for v in range(w) if not self.values[w].in_forward and self._is_of_one(w, v)]
        return draws[0] if draws and not self._waits(draws[0], kept) else self._first_place(w)

    def _taken_by(self, v: int, kept: set[int]) -> int:
        """The value that is written over the buffer behind the forward, or -1: the first that waits gives its place."""
        last = self._readers_behind(v)[-1]
        earlier = [
            u
            for u in sorted(self.buffers)
            if u < v and last in self._readers_behind(u)[-1:] and self._fits(u, last) and self._waits(u, kept)
            if self._whole_of(u) < 0
        ]
        return last if self._fits(v, last) and not earlier and self._whole_of(v) < 0 else -1

    def _fits(self, v: int, w: int) -> bool:
        a, b = self.values[v], self.values[w]
        return b.kernel == POINTWISE and (a.nbytes, a.is_channels_last) == (b.nbytes, b.is_channels_last)

    def _takes_over(self, w: int, kept: set[int]) -> bool:
        """Whether a value is written over a buffer that is held for it, so that it has none of its own."""
        if self.values[w].in_forward:
            return False
        sources = (self._sources_behind(w) & self.buffers) - kept
        return any(self._taken_by(v, kept) == w and self._waits(v, kept) for v in sources)

    def _whole_of(self, v: int) -> int:
        """The concatenation that an unsaved part with a buffer lies in; -1 for none."""
        return -1 if v in self.saved else self._joined_to(v)

    def _joined_to(self, v: int) -> int:
        """The concatenation that a part is written into before it stands there: one that something else reads too; -1 for none."""
        if v not in self.buffers or self.values[v].is_drawn:
            return -1
        whole = next((w for w in sorted(self.buffers) if v in self.values[w].parts), -1)
        return whole if set(self.readers[v]) - {whole} else -1

    def _begins_at(self, w: int) -> int:
        """Where a buffer begins: a concatenation with its first part, whose kernel writes it there, also where it is saved."""
        parts = [v for v in self.values[w].parts if self._joined_to(v) == w]
        return min([self._first_place(w), *map(self._first_place, parts)])

    def _inside(self, w: int) -> list[int]:
        return [v for v in self.values[w].parts if self._whole_of(v) == w]

    def _is_alive(self, v: int, place: int, kept: set[int]) -> bool:
        """Whether a buffer that is not saved is read at or behind a place, itself or a part that lies in it."""
        is_over = self.overwritten.get(v) == place
        is_read = (place <= self.last_place(v) and not is_over) or place <= self._read_behind(v, kept)
        return is_read or any(self._is_alive(part, place, kept) for part in self._inside(v))

    def _is_copied(self, w: int) -> bool:
        """Whether a concatenation is copied for a reader, which happens after what it is made of is freed."""
        has_copy = self.values[w].transient_bytes >= self.values[w].nbytes and any(w in v.copies for v in self.values)
        return has_copy or bool(self.values[w].ordered_by)

    def _ends_at(self, v: int, place: int, kept: set[int]) -> bool:
        """Whether a buffer of its own is freed behind a place."""
        if v in kept or self._whole_of(v) >= 0 or self._is_drawn_for_readers(v) or self._begins_at(v) > place:
            return False
        is_taken = self.overwritten.get(v) == place + 1
        return self._is_alive(v, place, kept) and not is_taken and not self._is_alive(v, place + 1, kept)

    def live_bytes(self, place: int, kept: set[int]) -> int:
        """Bytes that live while node `place` runs (or at the end), if `kept` are saved."""
        runs = place < self.size and self.values[place].in_forward
        live = self.values[place].transient_bytes + self.values[place].workspace_bytes if runs else 0
        if runs and self._is_copied(place):
            is_told = set(self.values[place].ordered_by) & self.saved  # made in its reader's order
            freed = sum(self.values[v].nbytes for v in self.buffers if self._ends_at(v, place, kept))
            live -= self.values[place].nbytes if is_told else min(self.values[place].nbytes, freed)
        for v in range(self.size):
            if self._whole_of(v) >= 0:
                continue
            by_plan = v in kept and place >= self._written_at(v, kept) and not self._takes_over(v, kept)
            by_itself = v in self.buffers and self._begins_at(v) <= place
            by_itself = by_itself and (v in kept or self._is_alive(v, place, kept))
            written = runs and self._first_place(v) == place != v  # whether anything reads it or not
            live += self.values[v].nbytes if by_plan or by_itself or written else 0
        return live


# -- all plans --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllPlans:
    """Peak, saved bytes and time of every plan of a small problem."""

    masks: NDArray[np.bool_]
    peaks: NDArray[np.int64]
    times: NDArray[np.int64]
    saved_bytes: NDArray[np.int64]

    @property
    def lowest_peak(self) -> int:
        """The least peak of any plan."""
        return int(self.peaks.min())

    def fastest_within(self, budget_bytes: int) -> int | None:
        """Time of the fastest plan whose peak fits; None where none does."""
        fits = self.peaks <= budget_bytes
        return int(self.times[fits].min()) if fits.any() else None


def free_choices(problem: Problem) -> list[int]:
    """Values that a plan may save or not."""
    return [v for v, value in enumerate(problem.values) if value.is_saveable and value.pin == FREE]


def all_plans(problem: Problem) -> AllPlans:
    """Simulate every saved set (pinned values included in each)."""
    free = free_choices(problem)
    n, count = len(problem.values), 1 << len(free)
    masks = np.zeros((n, count), dtype=bool)
    for k, v in enumerate(free):
        masks[v] = (np.arange(count) >> k) & 1
    for v, value in enumerate(problem.values):
        masks[v] |= value.pin == SAVE and value.is_saveable
    batch = Simulator(problem).run(masks)
    return AllPlans(masks, batch.peak, batch.time_ns, batch.saved_bytes)


# -- the cut ----------------------------------------------------------------------------------------------------------


def networkx_cut_value(problem: Problem, price: int) -> int:
    """Least `price` x saved bytes + time over all plans, by networkx; -1 where nothing is to be computed."""
    graph = nx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for v, value in enumerate(problem.values):
        nbytes = 0 if value.is_output else value.nbytes
        _edge(graph, ("A", v), ("R", v), value.save_time_ns + price * nbytes if value.is_saveable else None)
        _edge(graph, ("R", v), "sink", None if value.pin == SAVE and value.is_saveable else value.time_ns)
        for u in value.reads:
            _edge(graph, ("R", v), ("A", u), None)
    for step in problem.steps:
        for v in step.reads:
            _edge(graph, "source", ("A", v), None)
    return int(nx.maximum_flow_value(graph, "source", "sink"))


def _edge(graph: nx.DiGraph, tail: object, head: object, capacity: int | None) -> None:
    graph.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))


# -- the whole plan, exactly ------------------------------------------------------------------------------------------


def highs_fastest(problem: Problem, budget_bytes: int) -> int | None:
    """Least time of a plan whose peak fits, by HiGHS; None where there is none.

    Restriction: all values and steps are EXTERN, none is late, an output or transient, so that every node has a buffer
    from where it runs to its last reader and nothing is written over.

    Binaries: `s[v]` saved; `x[v, b]` computed once more in the burst before step b.  A value starts in a burst just if
    something in that burst reads it, and whatever reads it there or earlier finds it.  Moments are (b, k): value k of
    the burst before step b, and k = n is the step itself.  `a[v, moment]` is 1 while v is available and still to be
    read.
    """
    model = _Milp(problem)
    n, m = model.n, model.m
    for v in range(n):
        model.add({model.s(v): 1, **{model.x(v, b): 1 for b in range(m)}}, high=1)
        for b in range(m):
            model.add_start(v, b)
    for b in range(m):
        for k in range(n + 1):
            model.add_moment(b, k, budget_bytes)
    for place in range(n + 1):
        model.add_forward_place(place, budget_bytes)
    return model.solve()


class _Milp:
    def __init__(self, problem: Problem) -> None:
        self.values, self.steps = problem.values, problem.steps
        assert all(v.kernel == EXTERN and v.nbytes and not v.is_output and v.late_step < 0 for v in self.values)
        assert all(s.kernel == EXTERN for s in self.steps[:-1])
        self.n, self.m = len(self.values), len(self.steps)
        self.readers = [[w for w, x in enumerate(self.values) if v in x.reads] for v in range(self.n)]
        self.size = self.n + self.n * self.m + self.n * self.m * (self.n + 1)
        self.constraints: list[tuple[dict[int, float], float, float]] = []

    def s(self, v: int) -> int:
        return v

    def x(self, v: int, b: int) -> int:
        return self.n + v * self.m + b

    def a(self, v: int, b: int, k: int) -> int:
        return self.n + self.n * self.m + (v * self.m + b) * (self.n + 1) + k

    def add(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.constraints.append((terms, low, high))

    def add_start(self, v: int, b: int) -> None:
        """v starts before step b only for a reader there, and is there for every reader there."""
        is_read = v in self.steps[b].reads
        self.add({self.x(v, b): 1, **{self.x(w, b): -1.0 for w in self.readers[v]}}, high=float(is_read))
        here = {self.s(v): 1.0, **{self.x(v, c): 1.0 for c in range(b + 1)}}
        if is_read:
            self.add(here, low=1)
        for w in self.readers[v]:
            self.add({**here, self.x(w, b): -1.0}, low=0)

    def add_moment(self, b: int, k: int, budget_bytes: int) -> None:
        """What is available and still to be read is alive; all that is alive fits."""
        live: dict[int, float] = {}
        for v in range(self.n):
            made = [c for c in range(self.m) if (c, v) <= (b, k)]
            available = {self.s(v): 1.0, **{self.x(v, c): 1.0 for c in made}}
            alive = self.a(v, b, k)
            if any(v in self.steps[c].reads for c in range(b, self.m)):
                self.add({alive: 1.0, **{i: -c for i, c in available.items()}}, low=0)
            for w in self.readers[v]:
                ahead = {self.x(w, c): -1.0 for c in range(self.m) if (c, w) >= (b, k)}
                self.add({alive: 1.0, **{i: -c for i, c in available.items()}, **ahead}, low=-1)
            live[alive] = float(self.values[v].nbytes)
        self.add(live, high=budget_bytes - self._step_bytes(b, k))

    def _step_bytes(self, b: int, k: int) -> int:
        """Bytes of the gradients that live at a moment."""
        total = 0
        for g, step in enumerate(self.steps):
            last = max([g, *(c for c, s in enumerate(self.steps) if g in s.gradients)])
            last = self.m if step.is_output else last
            is_made = g < b or (g == b and k == self.n)
            total += step.nbytes if is_made and last >= b else 0
        return total

    def add_forward_place(self, place: int, budget_bytes: int) -> None:
        """The forward: a value lives to its last reader, or to the end if it is saved."""
        base, saved = 0, {}
        for v, value in enumerate(self.values):
            if v <= place <= max([v, *self.readers[v]]):
                base += value.nbytes
            elif v <= place:
                saved[self.s(v)] = float(value.nbytes)
        self.add(saved or {0: 0.0}, high=budget_bytes - base)

    def solve(self) -> int | None:
        cost = np.zeros(self.size)
        lower, upper = np.zeros(self.size), np.ones(self.size)
        for v, value in enumerate(self.values):
            cost[self.s(v)] = value.save_time_ns
            for b in range(self.m):
                cost[self.x(v, b)] = value.time_ns
                upper[self.x(v, b)] = value.pin != SAVE
            upper[self.s(v)] = value.is_saveable
        matrix = np.zeros((len(self.constraints), self.size))
        for row, (terms, _, _) in enumerate(self.constraints):
            for column, factor in terms.items():
                matrix[row, column] = factor
        limits = LinearConstraint(matrix, [c[1] for c in self.constraints], [c[2] for c in self.constraints])
        integer = np.arange(self.size) < self.n + self.n * self.m
        found = milp(cost, constraints=limits, bounds=Bounds(lower, upper), integrality=integer.astype(int))
        assert found.status in (0, 2), found.message
        return None if found.status == 2 else round(found.fun)


# -- random problems --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What kind of problems to draw."""

    max_values: int = 9
    max_late: int = 3
    max_steps: int = 7
    extern_only: bool = False
    with_memory_of_kernels: bool = False


def random_problem(rng: random.Random, shape: Shape = Shape()) -> Problem:
    """A problem that a joint graph could have given: every step is read or returned, what is late is read late."""
    values = _random_values(rng, shape)
    num_steps = rng.randint(1, shape.max_steps)
    values += _random_late(rng, shape, len(values), values, num_steps)
    steps = _random_steps(rng, shape, values, num_steps)
    places = _positions(values)
    values = [Value(**{**value.__dict__, "position": places[v]}) for v, value in enumerate(values)]
    if shape.with_memory_of_kernels:
        values, steps = _with_memory_of_kernels(rng, values, steps)
    return Problem(tuple(values), tuple(steps), step_time_ns=sum(v.time_ns for v in values) + len(steps))


def seeded_problem(seed: int, shape: Shape = Shape()) -> Problem:
    """The same problem for the same seed, on every machine."""
    return random_problem(random.Random(seed), shape)


problems = st.builds(random_problem, st.randoms(use_true_random=False), st.just(Shape(with_memory_of_kernels=True)))
"""Random problems that hypothesis can shrink."""


def chain(length: int, nbytes: int = 1, time_ns: int = 1) -> Problem:
    """Equal layers, each a kernel; the backward reads them from the last to the first and returns one gradient."""
    values = tuple(Value(f"v{k}", nbytes, EXTERN, (k - 1,) if k else (), time_ns, position=k) for k in range(length))
    steps = [Step(f"g{k}", nbytes, EXTERN, (length - 1 - k,), (k - 1,) if k else (), time_ns) for k in range(length)]
    steps.append(Step(f"g{length}", nbytes, EXTERN, (), (length - 1,), time_ns, is_output=True))
    steps.append(Step("output", 0, CONSTANT, (), (length,)))
    return Problem(values, tuple(steps), 2 * length * time_ns)


def _random_values(rng: random.Random, shape: Shape) -> list[Value]:
    values: list[Value] = []
    for _ in range(rng.randint(1, shape.max_values)):
        kernel = (
            EXTERN if shape.extern_only else rng.choice([POINTWISE] * 5 + [EXTERN] * 3 + [REDUCTION, CONSTANT, ITEM])
        )
        if kernel == ITEM:
            values += _random_tuple(rng, values)
        else:
            values.append(_random_value(rng, shape, len(values), kernel, _pick(rng, values)))
    return values


def _random_value(rng: random.Random, shape: Shape, index: int, kernel: str, reads: tuple[int, ...]) -> Value:
    plain = shape.extern_only
    return Value(
        name=f"v{index}",
        nbytes=rng.choice([1, 2, 2, 4, 4, 8]),
        kernel=kernel,
        reads=() if kernel == CONSTANT else reads,
        time_ns=rng.randint(0 if kernel == POINTWISE else 1, 6),
        save_time_ns=rng.choice([0, 0, 1, 2]) if kernel == POINTWISE else 0,
        pin=rng.choice([FREE] * 10 + [SAVE, RECOMPUTE]),
        is_output=not plain and rng.random() < 0.1,
        realised=kernel == POINTWISE and rng.random() < 0.1,
        transient_bytes=rng.choice([0, 0, 0, 1]) if kernel == EXTERN and not plain else 0,
    )


def _random_tuple(rng: random.Random, values: list[Value]) -> list[Value]:
    """A node with several outputs, then its outputs."""
    first = len(values)
    kernel = rng.choice([EXTERN, REDUCTION])
    whole = Value(f"v{first}", 0, kernel, _pick(rng, values), rng.randint(1, 6), transient_bytes=rng.choice([0, 3]))
    count = rng.randint(1, 2)
    items = [Value(f"v{first + 1 + k}", rng.choice([1, 2, 4]), ITEM, (first,), 0) for k in range(count)]
    return [whole, *items]


def _with_memory_of_kernels(
    rng: random.Random, values: list[Value], steps: list[Step]
) -> tuple[list[Value], list[Step]]:
    """Some kernels with workspaces, some steps that are the last to read a copied input, some random numbers."""

    def workspace(node: Value | Step) -> int:
        return rng.choice([0, 0, 0, 2]) if node.kernel == EXTERN else 0

    def order() -> bool:
        return rng.random() < 0.2

    values = [
        replace(
            v,
            workspace_bytes=workspace(v),
            held_bytes=rng.choice([0, 0, 0, 0, 3]) if v.in_forward and v.kernel == POINTWISE else 0,
            is_drawn=v.realised and v.kernel == POINTWISE and rng.random() < 0.3,
            is_inner=v.realised and v.kernel == POINTWISE and rng.random() < 0.3,
            is_channels_last=order(),
            copies=v.reads[:1] if v.kernel == EXTERN and rng.random() < 0.1 else (),
            **_ordered(rng, v),
            gradient_readers=tuple(sorted({rng.randrange(len(steps)) for _ in range(2)})) if v.is_output else (),
        )
        for v in values
    ]
    values = _with_parts(rng, values)
    copies = [rng.choice([0, 0, 0, 0, 1]) for _ in steps]
    steps = [
        replace(
            s,
            workspace_bytes=workspace(s),
            held_bytes=nbytes,
            is_channels_last=order(),
            copies=s.reads[:1] if s.kernel == EXTERN and rng.random() < 0.2 else (),
        )
        for s, nbytes in zip(steps, copies, strict=True)
    ]
    return values, steps


def _with_parts(rng: random.Random, values: list[Value]) -> list[Value]:
    """Some pointwise values with a buffer whose pointwise sources are made in it, each in one only."""
    taken: set[int] = set()
    made: list[Value] = []
    for v, value in enumerate(values):
        parts: tuple[int, ...] = ()
        if (
            value.kernel == POINTWISE
            and value.realised
            and not value.is_drawn
            and v not in taken
            and rng.random() < 0.5
        ):
            fits = [values[r].kernel == POINTWISE and not (values[r].is_output or made[r].parts) for r in value.reads]
            parts = tuple(r for r, fit in zip(value.reads, fits, strict=True) if fit and r not in taken)
            parts = tuple(r for r in parts if not values[r].is_drawn)
            taken.update(parts)
        made.append(replace(value, parts=parts))
    return made


def _ordered(rng: random.Random, value: Value) -> dict[str, Any]:
    """A concatenation that is copied unless what it reads is saved."""
    if value.kernel != POINTWISE or not value.reads or not value.nbytes or rng.random() > 0.2:
        return {}
    return {"ordered_by": value.reads[:1], "transient_bytes": value.nbytes}


def _pick(rng: random.Random, values: list[Value]) -> tuple[int, ...]:
    """Some earlier values, mostly recent ones; never a tuple."""
    whole = [v for v, value in enumerate(values) if value.nbytes]
    near = whole[-3:] if rng.random() < 0.7 else whole
    return tuple(sorted(rng.sample(near, rng.randint(0 if not near else 1, min(3, len(near))))))


def _random_late(rng: random.Random, shape: Shape, first: int, values: list[Value], num_steps: int) -> list[Value]:
    """Values that only the backward needs; those from some point on stand among the steps."""
    late: list[Value] = []
    if shape.extern_only:
        return late
    stands = sorted(rng.choice([-1, *range(1, num_steps + 1)]) for _ in range(rng.randint(0, shape.max_late)))
    for k, late_step in enumerate(stands):
        drawn = _random_value(rng, shape, first + k, rng.choice([POINTWISE, POINTWISE, EXTERN]), ())
        reads = _pick(rng, values + late)
        changes = {"reads": reads, "in_forward": False, "is_output": False, "late_step": late_step}
        late.append(Value(**{**drawn.__dict__, **changes}))
    return late


def _random_steps(rng: random.Random, shape: Shape, values: list[Value], num_steps: int) -> list[Step]:
    steps: list[Step] = []
    for _ in range(num_steps):
        b = len(steps)
        kernel = EXTERN if shape.extern_only else rng.choice([POINTWISE, POINTWISE, EXTERN, EXTERN, REDUCTION, ITEM])
        readable = [v for v, value in enumerate(values) if value.nbytes and value.late_step <= min(b, num_steps)]
        reads = tuple(sorted(rng.sample(readable, rng.randint(0, min(2, len(readable))))))
        whole = [g for g, s in enumerate(steps) if s.nbytes]
        grads = tuple(sorted({*whole[-1:], *rng.sample(whole, min(len(whole), rng.randint(0, 1)))}))
        nbytes = rng.choice([1, 2, 4, 4])
        realised = kernel == POINTWISE and rng.random() < 0.1
        if kernel == ITEM:
            steps.append(Step(f"s{b}", 0, EXTERN, reads, grads, 1, transient_bytes=rng.choice([0, 2])))
            reads, grads = (), (b,)
        steps.append(Step(f"s{len(steps)}", nbytes, kernel, reads, grads, 1, realised=realised))
    read = {g for s in steps for g in s.gradients}
    steps = [
        Step(**{**s.__dict__, "is_output": s.nbytes > 0 and (g not in read or rng.random() < 0.15)})
        for g, s in enumerate(steps)
    ]
    returned = [v for v, value in enumerate(values) if value.nbytes and not value.is_output and not shape.extern_only]
    reads = (rng.choice(returned),) if returned and rng.random() < 0.1 else ()
    return [*steps, Step("output", 0, CONSTANT, reads, tuple(g for g, s in enumerate(steps) if s.is_output))]


def _positions(values: list[Value]) -> list[int]:
    """Places with every value that the forward does not need right behind what it reads."""
    order: list[int] = [v for v, value in enumerate(values) if value.in_forward]
    for v, value in enumerate(values):
        if not value.in_forward:
            behind = max((order.index(u) for u in value.reads), default=-1)
            order.insert(behind + 1, v)
    return [order.index(v) for v in range(len(values))]
