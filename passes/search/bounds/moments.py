"""Moments of the step with all buffers alive there, as rows of a linear programme.

A point of `lp_bound` counts saved values.  A moment counts recomputed values as well.  In the backward, these are the values that
a burst of recomputations leaves behind for later steps: for each value, a variable is 1 if the value is recomputed *later* than
the moment.  A value recomputed before the moment may stay in registers: its readers' kernels compute it, and its inputs live until
these kernels run.  In the forward, a moment counts the buffers that saving a value would have freed: buffers that later kernels
read through values in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from compile_remat.passes.memory.forward_epilogue import Source
from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import SAVE
from compile_remat.passes.search.bounds.lp_bound import gradient_bytes, last_steps, surely_buffers
from compile_remat.passes.search.bounds.programme import Entry, Programme


class Moments:
    """Adds the moments of one problem to a programme."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        problem, model, schedules = simulator.problem, simulator.lifetimes, simulator.schedules
        self.has_buffer = (simulator.nbytes > 0) & model.always_stored
        self.is_buffer = surely_buffers(simulator)
        self.first = np.minimum(schedules.first_anchor, schedules.late_anchor)
        self.earliest, self.last = schedules.earliest, last_steps(simulator)
        self.gradients = gradient_bytes(simulator)
        self.is_always_saved = [v.pin == SAVE and v.is_saveable for v in problem.values]
        self._written_over = dict(model.step_in_place_sources)
        self.is_in_registers = ~(model.runs_once | model.is_sometimes_stored)
        self.is_in_registers[list(model.whole_of)] = False  # a concatenation may store it

    # -- in the backward ----------------------------------------------------------------------------------------------

    def backward(self, programme: Programme, b: int) -> None:
        """Adds the rows of the moment at which step `b` runs."""
        later = self._later(programme, int(self.simulator.schedules.step_anchor[b]))
        self._runs_with_its_readers(programme, later)
        through = self._through_registers(programme, later, b)
        fixed, entries = int(self.gradients[b]), list[Entry]()
        for v in np.flatnonzero(self.simulator.saved_nbytes > 0).tolist():
            nbytes = int(self.simulator.saved_nbytes[v])
            absent = self._absent(programme, later, v)
            if self.last[v] >= b:  # alive unless it is recomputed later
                fixed += nbytes
                entries += [] if absent is None else [(absent, -nbytes)]
            else:
                readers = self.simulator.readers[v]
                awaited = [later[w] for w in readers]
                awaited += [] if v in self._written_over.get(b, ()) else [through.get(w) for w in readers]
                entries += self._awaited(programme, awaited, absent, nbytes)
        entries += self._concatenations(programme, later)
        programme.point(entries, fixed)

    def _later(self, programme: Programme, anchor: int) -> list[int | None]:
        """For each value, the number of the variable that is 1 if the value is recomputed later; None if that is impossible."""
        later: list[int | None] = []
        for v, is_saved in enumerate(self.is_always_saved):
            if is_saved or self.first[v] <= anchor:
                later.append(None)
            else:
                later.append(programme.num_values + v if self.earliest[v] > anchor else programme.variables())
        return later

    def _runs_with_its_readers(self, programme: Programme, later: Sequence[int | None]) -> None:
        """Adds rows: a value that no step reads by then is recomputed before the moment if and only if one of its readers is."""
        n = programme.num_values
        for v, own in enumerate(later):
            if own is None or own == n + v:
                continue
            programme.at_most([(own, 1), (n + v, -1)])
            only: list[Entry] = [(n + v, 1), (own, -1)]
            for w in self.simulator.readers[v]:
                if later[w] == n + w or self.is_always_saved[w]:
                    continue
                reader = later[w]
                is_later: list[Entry] = [] if reader is None else [(reader, 1)]
                programme.at_most([(own, 1), (n + w, 1), *((x, -1) for x, _ in is_later)], 1.0)
                only += [(n + w, -1), *is_later]
            programme.at_most(only)

    def _through_registers(self, programme: Programme, later: Sequence[int | None], b: int) -> dict[int, int]:
        """Maps values in registers to the variable that is 1 if the value is computed before the moment and read after it."""
        n, through = programme.num_values, dict[int, int]()
        for w in reversed(np.flatnonzero(self.is_in_registers).tolist()):
            if self.is_always_saved[w] or later[w] == n + w:
                continue
            if self.last[w] >= b:  # a step reads it
                through[w] = n + w
                continue
            readers = self.simulator.readers[w]
            behind = [x for r in readers for x in (later[r], through.get(r)) if x is not None]
            if behind:
                through[w] = programme.variables()
                for x in dict.fromkeys(behind):
                    programme.at_most([(n + w, 1), (x, 1), (through[w], -1)], 1.0)
        return through

    def _absent(self, programme: Programme, later: Sequence[int | None], v: int) -> int | None:
        """The variable that is 1 if an available value has no buffer at the moment; None if the value has a buffer in any case."""
        if self.is_always_saved[v]:
            return None
        return later[v] if self.is_buffer[v] else programme.num_values + v

    def _awaited(
        self, programme: Programme, readers: Sequence[int | None], absent: int | None, nbytes: int
    ) -> list[Entry]:
        """Entry of a value that stays alive for a later recomputation, or for a read through registers after the moment."""
        waiting = [reader for reader in readers if reader is not None]
        if not waiting:
            return []
        alive = programme.variables()
        for reader in waiting:
            programme.at_most([(reader, 1), (alive, -1), *([] if absent is None else [(absent, -1.0)])])
        return [(alive, nbytes)]

    def _concatenations(self, programme: Programme, later: Sequence[int | None]) -> list[Entry]:
        """Entries of the concatenations, whose buffers live from their first part on."""
        n, entries = programme.num_values, list[Entry]()
        for w, parts in self.simulator.lifetimes.parts:
            inside = [v for v in parts if self.has_buffer[v] and not self.is_always_saved[v] and later[v] != n + v]
            whole = later[w]
            if not self.has_buffer[w] or whole is None or not inside:
                continue
            begun = programme.variables()
            for v in inside:
                part = later[v]
                entries_of = [] if part is None else [(part, -1.0)]
                programme.at_most([(n + v, 1), *entries_of, (whole, 1), (begun, -1)], 1.0)
            entries.append((begun, int(self.simulator.nbytes[w])))
        return entries

    # -- in the forward -----------------------------------------------------------------------------------------------

    def forward(self, programme: Programme, place: int) -> None:
        """Adds the rows of the moment at which the value at `place` of the forward is computed; the last place is the end."""
        forward, n = self.simulator.forward, programme.num_values
        reach = self._reach(programme, place)
        fixed, entries = int(forward.fixed[place]), list[Entry]()
        for v in range(n):
            nbytes = int(forward.saved_nbytes[v])
            if not forward.stored[v]:
                entries += programme.saved(v, nbytes) if nbytes and forward.begins_if_saved[v] <= place else []
            elif forward.begin[v] <= place and forward.nbytes[v]:
                reasons = self._reasons(programme, v, place, reach)
                if reasons is None:
                    fixed += int(forward.nbytes[v])
                elif reasons:
                    alive = programme.variables()
                    for reason in reasons:
                        programme.at_most([*reason, (alive, -1)])
                    entries.append((alive, int(forward.nbytes[v])))
        programme.point(entries, fixed)

    def _reach(self, programme: Programme, place: int) -> dict[int, int]:
        """Maps values in registers that a kernel after the place may read to the variable that is 1 if a kernel does.

        A value that was saved before the place is read from memory, so the value's inputs are not needed for it.
        """
        forward, reach = self.simulator.forward, dict[int, int]()
        for v, least, open_readers in forward.varying:
            if v not in self._in_registers or forward.longest[v] <= place:
                continue
            reach[v] = programme.variables()
            cut = programme.saved(v, -1.0) if forward.may_be_cut[v] and v <= place else []
            if least > place:
                programme.at_most([(reach[v], -1), *cut], -1.0)
            for w in open_readers:
                if w in reach:
                    programme.at_most([(reach[w], 1), (reach[v], -1), *cut])
        return reach

    def _reasons(self, programme: Programme, v: int, place: int, reach: dict[int, int]) -> list[list[Entry]] | None:
        """The reasons for which a buffer of the forward may be alive at a place; None if the buffer is alive in every plan."""
        forward = self.simulator.forward
        if forward.first_stop[v] > place:
            return None
        reasons = [programme.saved(v)] if forward.saved_nbytes[v] else []
        if v in forward.joined_at:
            return reasons  # the part lies in a concatenation, or is saved
        if v in self._varying and forward.longest[v] > place:
            least, open_readers = self._varying[v]
            if least > place:
                return None
            reasons += [[(reach[w], 1.0)] for w in open_readers if w in reach]
        source = self._sources.get(v)
        if source is not None and place < source.readers[-1]:
            waiting = [w for w in source.readers if w not in source.written_with and forward.saved_nbytes[w]]
            reasons += [programme.saved(w) for w in waiting]
        return reasons

    @cached_property
    def _varying(self) -> dict[int, tuple[int, list[int]]]:
        return {v: (least, open_readers) for v, least, open_readers in self.simulator.forward.varying}

    @cached_property
    def _in_registers(self) -> frozenset[int]:
        forward = self.simulator.forward
        return frozenset(v for v in self._varying if not forward.runs_once(v))

    @cached_property
    def _sources(self) -> dict[int, Source]:
        return {source.value: source for source in self.simulator.forward.epilogue.sources}
