"""Live bytes of the forward under many plans at once.

A saved value has a buffer of its own.  The value's inputs may be freed once the buffer is written, because later readers load the
buffer and do not recompute the value in registers.  No kernel reuses a saved buffer in place.  A value computed in the
`forward_epilogue` keeps its inputs alive to the end of the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compile_remat.passes.memory.buffers import Bools, Ints, may_be_written_over, register_path
from compile_remat.passes.memory.forward_epilogue import Source, epilogue_sources
from compile_remat.passes.memory.inplace import Overwriting
from compile_remat.passes.memory.reader_levels import in_levels
from compile_remat.passes.problem.problem import ITEM, POINTWISE, Value


@dataclass(frozen=True)
class ForwardLifetimes:
    """Live ranges of the buffers of P plans in the forward; arrays are [values, P].

    Attributes:
        saved: True where a value is saved in a buffer of its own, not in a buffer reused in place.
        stops: The place before which the buffer of an unsaved value is freed.
        taken: True where the kernel at that place reuses the buffer in place.
        beside: Sources with `Source.written_with`, each with a mask of the plans that compute these values at the end, [P].
        copy_stops: For `Forward.held`, the place before which the copy of an input is freed, [K, P]: after the last kernel that
            reads the copy, or never if the backward recomputes the value.
    """

    saved: Bools
    stops: NDArray[np.int32]
    taken: Bools
    beside: Sequence[tuple[Source, Bools]]
    copy_stops: NDArray[np.int32]


class _Epilogue:
    """The sources: buffers of the forward that values of the epilogue read; arrays are [sources].

    Attributes:
        values: Index of the value in each source's buffer.
        last_readers: The last reader of each source.
        turns: Indices of sources whose last reader can reuse their buffer; turn k holds each reader's k-th such source.
        others: Readers of each source outside `Source.written_with`, or all its readers if none is outside; source by source.
        firsts: Position in `others` at which each source's readers begin.
    """

    def __init__(self, sources: Sequence[Source], joined: Collection[int] = ()) -> None:
        """No reader can reuse the values in `joined` in place: these values lie in the buffer of a concatenation."""
        self.sources = sources
        self.values = np.array([s.value for s in sources], dtype=np.int64)
        self.last_readers = np.array([s.readers[-1] for s in sources], dtype=np.int32)
        self.turns = [np.array(turn, dtype=np.int64) for turn in _turns(sources, joined)]
        others = [[v for v in s.readers if v not in s.written_with] or list(s.readers) for s in sources]
        self.others = np.array([v for readers in others for v in readers], dtype=np.int64)
        self.firsts = np.cumsum([0, *map(len, others)], dtype=np.int64)[:-1]


def _turns(sources: Sequence[Source], joined: Collection[int]) -> list[list[int]]:
    turns: list[list[int]] = []
    before: dict[int, int] = {}
    for k, source in enumerate(sources):
        if source.may_be_taken and source.value not in joined:
            turn = before.get(source.readers[-1], 0)
            before[source.readers[-1]] = turn + 1
            turns += [[]] if turn == len(turns) else []
            turns[turn].append(k)
    return turns


class Forward:
    """The forward of one problem; facts that are equal in every plan are computed once.

    Args:
        stored: True for a value that has a buffer even if the plan does not save it, [values].
        readers: Indices of each value's readers.
        held_bytes: Bytes of the input copies that live through the whole forward.

    Attributes:
        held: Indices of the values computed from copies of inputs, [K].
        held_by_one: True if one kernel computes such a value, False if the kernel of each of its readers does, [K].
        joined_at: Maps parts of concatenations, which have a buffer, to the concatenation: an unsaved part lies in the
            concatenation's buffer, and the kernel of a saved part also copies the part into that buffer.
        copied: Maps concatenations that are copied for their readers, once their inputs are freed, to `Value.ordered_by`: if one
            of these values is saved, no copy is made.
        order: Indices of the values, sorted by the place from which saving a value costs bytes.
        first_stop: The earliest place before which a plan may free each value's buffer, [values].
        tops: For each value in `order`, the most bytes live in every plan from that place to the next one; for lower bounds.
    """

    def __init__(
        self,
        values: Sequence[Value],
        stored: Bools,
        readers: Sequence[Sequence[int]],
        held_bytes: int,
    ) -> None:
        n = len(values)
        self.values, self.size = values, n
        self.stored = stored & np.array([v.in_forward for v in values], dtype=bool)
        self.readers = [[w for w in r if values[w].in_forward] for r in readers]
        self.nbytes = np.array([v.nbytes for v in values], dtype=np.int64)
        self.saved_nbytes = np.array([0 if v.is_output else v.nbytes for v in values], dtype=np.int64)
        self.begin = np.array(
            [v.reads[0] if v.kernel == ITEM and v.reads else k for k, v in enumerate(values)], dtype=np.int64
        )
        self._is_stored: list[bool] = self.stored.tolist()
        self._may_be_cut = [self._is_in_open_registers(v) for v in range(n)]
        self.may_be_cut = np.array(self._may_be_cut, dtype=bool)
        self._find_ends()
        self.joined_at = self._find_joins()
        self.epilogue = _Epilogue(epilogue_sources(values, stored.tolist()), self.joined_at)
        self.sources = self._find_sources()
        self.overwriting = Overwriting(self.sources)
        copied = {w for v in values for w in v.copies if values[w].transient_bytes >= values[w].nbytes}
        self.copied = {
            w: list(v.ordered_by) for w, v in enumerate(values) if v.in_forward and (v.ordered_by or w in copied)
        }
        self.held = np.flatnonzero([v.held_bytes for v in values])
        self.held_nbytes = np.array([v.held_bytes for v in values if v.held_bytes], dtype=np.int64)
        self.held_by_one: Bools = np.array([self.runs_once(v) for v in self.held.tolist()], dtype=bool)
        self.fixed = self._fixed_bytes(held_bytes)
        is_part = (self.begin != np.arange(n)) & np.array([v.in_forward for v in values], dtype=bool)[self.begin]
        self.begins_if_saved = self.begin + is_part  # the place at which a value without a buffer gets one if saved
        self.begins_if_saved[[v.is_snapshot for v in values]] = n  # the forward copies inputs at its end
        for v, w in self.joined_at.items():
            self.begin[w] = min(self.begin[w], v)
        self.sure = np.flatnonzero(self.stored & (self.nbytes > 0))
        begun = np.bincount(self.begin[self.sure], self.nbytes[self.sure], minlength=n + 1)
        self.always = self.fixed + np.cumsum(begun)  # and all buffers of every plan, none of them freed
        self.tops, self.order = self._lowest()
        charged = np.flatnonzero(self.saved_nbytes[self.order] > 0)
        self._charged = self.order[charged]
        self._tops_behind = np.maximum.reduceat(self.tops, charged) if len(charged) else self.tops[:0]
        self._freed_at = {w: self._may_be_freed_at(w) for w in self.copied}

    def _is_in_open_registers(self, v: int) -> bool:
        """Returns whether an unsaved value stays in registers and a plan may save the value."""
        value = self.values[v]
        is_in_registers = value.in_forward and value.kernel == POINTWISE and not self._is_stored[v]
        return is_in_registers and value.is_saveable and value.nbytes > 0

    def reading(self, v: int) -> list[int]:
        """Indices of the forward's kernels that read a value's buffer, directly or through values in registers."""
        found, seen, stack = list[int](), set[int](), [v]
        while stack:
            for w in self.readers[stack.pop()]:
                if w not in seen:
                    seen.add(w)
                    found += [w] if self.runs_once(w) else []
                    stack += [] if self.runs_once(w) else [w]
        return found

    def runs_once(self, v: int) -> bool:
        """Returns whether one kernel computes the value; if not, each kernel that reads the value computes it in registers."""
        return self._is_stored[v] or self.values[v].kernel != POINTWISE

    def _find_ends(self) -> None:
        """Sets each buffer's last place with no value saved and with all values saved, and lists the values where these differ."""
        n = self.size
        longest, shortest = list(range(n)), list(range(n))
        for v in range(n - 1, -1, -1):
            for w in self.readers[v]:
                once = self.runs_once(w)
                longest[v] = max(longest[v], w if once else longest[w])
                shortest[v] = max(shortest[v], w if once or self._may_be_cut[w] else shortest[w])
        is_output = np.array([v.is_output for v in self.values], dtype=bool)
        self.longest = np.where(is_output, n, np.array(longest, dtype=np.int32))
        self.shortest = np.where(is_output, n, np.array(shortest, dtype=np.int32))
        varying = np.flatnonzero((self.longest != self.shortest) | self.may_be_cut)[::-1].tolist()
        among = frozenset(varying)
        longest = self.longest.tolist()
        self.varying = [(v, *self._bounded_end(v, among, longest)) for v in varying]
        self._levels = in_levels([(v, readers) for v, _, readers in self.varying])
        self._common_ends = self.longest.copy()
        for v, least, _ in self.varying:
            self._common_ends[v] = least

    def _bounded_end(self, v: int, varying: frozenset[int], longest: Sequence[int]) -> tuple[int, list[int]]:
        """Returns the last place common to all plans, and the readers through which some plans read the value's buffer later."""
        if self.values[v].is_output:
            return self.size, []
        is_open = {w: w in varying and not self.runs_once(w) for w in self.readers[v]}
        fixed = [w if self.runs_once(w) else longest[w] for w in self.readers[v] if not is_open[w]]
        return max([v, *fixed]), [w for w in self.readers[v] if is_open[w]]

    def _find_sources(self) -> list[tuple[int, list[int]]]:
        """Kernels in order, each with the buffers of its size whose last reader the kernel is in some plan."""
        found, stored, values = [], self._is_stored, self.values
        shortest, longest = self.shortest.tolist(), self.longest.tolist()
        for w, value in enumerate(values):
            if value.kernel == POINTWISE and value.in_forward and (stored[w] or self._may_be_cut[w]):
                path = register_path(value.reads, values, stored)
                own = [v for v in path if stored[v] and v not in self.joined_at]  # no part of a concatenation
                last_read = [v for v in own if shortest[v] <= w <= longest[v]]
                sources = [v for v in last_read if may_be_written_over(values[v], value) and not values[v].is_output]
                if sources:
                    found.append((w, sources))
        return found

    def _find_joins(self) -> dict[int, int]:
        """Maps parts of concatenations to the concatenation, where both have a buffer.

        Parts that only the concatenation reads are left out: such a part is computed at the concatenation, and the part's inputs
        live until then instead of the part.
        """
        found = dict[int, int]()
        for w, value in enumerate(self.values):
            for v in value.parts if self._is_stored[w] and value.nbytes and value.in_forward else ():
                has_buffer = self._is_stored[v] and self.nbytes[v] > 0
                if has_buffer and any(reader != w for reader in self.readers[v]):
                    found[v] = w
        return found

    def _fixed_bytes(self, held_bytes: int) -> Ints:
        """Bytes live in every plan at each place and at the end, [values + 1]: input copies, workspaces, unread outputs."""
        fixed = np.full(self.size + 1, held_bytes, dtype=np.int64)
        begin = self.begin.tolist()
        for v, value in enumerate(self.values):
            if value.held_bytes:
                fixed[: v + 1] += value.held_bytes
            beside_bytes = value.transient_bytes + value.workspace_bytes + value.observed_forward_bytes
            if value.in_forward and beside_bytes:
                fixed[v] += beside_bytes - (value.nbytes if v in self.copied else 0)
            if begin[v] != v and self.values[begin[v]].in_forward and not self._is_stored[v]:
                fixed[begin[v]] += value.nbytes  # only the backward reads this output, but the kernel writes it
        return fixed

    def _may_be_freed_at(self, w: int) -> Ints:
        """Indices of stored values that some plan frees after place `w`; concatenations with parts of their own always count."""
        is_last = (self.first_stop <= w + 1) & (self.longest >= w)
        is_last[list(self.joined_at.values())] = True
        return self.sure[(is_last & (self.begin <= w))[self.sure]]

    # -- many plans ---------------------------------------------------------------------------------------------------

    def peak(self, used: Bools, recomputed: Bools) -> Ints:
        """Most bytes live at once, [P], in plans that save the columns of `used`, [values, P], for the backward.

        Args:
            recomputed: True for a value that the plan recomputes in the backward, [values, P].
        """
        if not self.size:
            return np.zeros(used.shape[1], dtype=np.int64)
        return np.asarray(self.live(self.lifetimes(used, recomputed)).max(axis=1), dtype=np.int64)

    def least_peaks(self, used: Bools) -> Ints:
        """Bytes that `peak` of the plans does not go below, [P]: `tops` and what is saved by then; a small part of its work."""
        saved = np.where(used[self._charged], self.saved_nbytes[self._charged, None], 0)
        return np.asarray((np.cumsum(saved, axis=0) + self._tops_behind[:, None]).max(axis=0, initial=0))

    def lifetimes(self, used: Bools, recomputed: Bools, *, with_epilogue: bool = True) -> ForwardLifetimes:
        """Live ranges of the plans' buffers; arguments as in `peak`.

        Args:
            with_epilogue: True to keep the inputs of the epilogue's values alive to the end of the forward.
        """
        ends, epilogue = self._ends(used), self.epilogue if with_epilogue else _Epilogue(())
        never = self.size + 1
        last_read = np.where(self.held_by_one[:, None] | used[self.held], self.held[:, None], ends[self.held])
        copy_stops = np.where(recomputed[self.held], never, np.minimum(last_read + 1, never))
        held = self._are_held(epilogue, used)
        u, last = epilogue.values, epilogue.last_readers
        ends[u] = np.where(held, np.maximum(ends[u], last[:, None]), ends[u])
        taken = self._overwritten(used, ends)
        stops = ends + 1 - taken
        np.copyto(stops, never, where=used)
        covered = np.zeros(used.shape, dtype=bool)  # values saved in a buffer reused in place
        for turn in epilogue.turns:
            u, last = epilogue.values[turn], epilogue.last_readers[turn]
            over = held[turn] & used[last] & self.stored[u, None] & ~covered[last]
            stops[u] = np.where(over, never, stops[u])
            covered[last] |= over
        self._join(used, stops)
        beside = [(source, held[k]) for k, source in enumerate(epilogue.sources) if source.written_with]
        return ForwardLifetimes(used & ~covered, stops, taken, beside, copy_stops)

    def _join(self, used: Bools, stops: NDArray[np.int32]) -> None:
        """Changes `stops`: an unsaved part has no buffer, and its concatenation's buffer lives as long as the part is read."""
        for v, w in self.joined_at.items():
            np.maximum(stops[w], stops[v], out=stops[w], where=~used[v])
            np.copyto(stops[v], self.begin[v], where=~used[v])

    def _are_held(self, epilogue: _Epilogue, used: Bools) -> Bools:
        """Mask of the unsaved sources that values of the epilogue keep alive to the end of the forward, [sources, P]."""
        held = (
            np.logical_or.reduceat(used[epilogue.others], epilogue.firsts, axis=0) if len(epilogue.firsts) else used[:0]
        )
        for k, source in enumerate(epilogue.sources):
            if source.written_with:
                with_it, nbytes = list(source.written_with), self.nbytes[source.value]
                held[k] &= len(source.readers) > len(with_it)
                if self.nbytes[with_it].sum() > nbytes:
                    held[k] |= self.nbytes[with_it].astype(np.float64) @ used[with_it] > nbytes
        return np.asarray(held & ~used[epilogue.values])

    def _ends(self, used: Bools) -> NDArray[np.int32]:
        """The last place at which each value's buffer is read, [values, P]."""
        ends = np.repeat(self._common_ends[:, None], used.shape[1], axis=1)
        reach = np.empty_like(ends)  # the place until which a value's inputs stay alive
        for level in self._levels:
            level.raise_rows(ends, reach)
            rows = ends[level.values]
            is_cut = used[level.values] & self.may_be_cut[level.values, None]
            reach[level.values] = np.where(is_cut, level.values[:, None], rows)
        return ends

    def _overwritten(self, used: Bools, ends: NDArray[np.int32]) -> Bools:
        """Mask of the buffers that a kernel reuses in place, [values, P]; False if an unsaved part in it is read as long."""
        taken = np.zeros(used.shape, dtype=bool)
        kernels = self.overwriting.kernels
        free = self.stored[kernels, None] | used[kernels]  # a saved value has a buffer, even if an unsaved one has none
        own = ~used & self.stored[:, None]
        for v, w in self.joined_at.items():
            own[w] &= used[v] | (ends[v] < ends[w])
        self.overwriting.mark(taken, free, kernels[:, None], own, ends)
        return taken

    def live(self, lifetimes: ForwardLifetimes) -> Ints:
        """Live bytes at each place and at the end of the forward, [P, values + 1]."""
        saved, stops = lifetimes.saved, lifetimes.stops
        plans, width = saved.shape[1], self.size + 2
        rows = np.arange(plans, dtype=np.int64) * width
        rest = np.flatnonzero(~self.stored & (self.saved_nbytes > 0) & saved.any(axis=1))
        late = np.repeat(self.begins_if_saved[rest][:, None], plans, axis=1)
        row_of = dict(zip(rest.tolist(), range(len(rest)), strict=True))
        for source, waits in lifetimes.beside:
            for row in (row_of[v] for v in source.written_with if v in row_of):
                late[row] = np.where(waits, late[row], source.value)
        sure = self.sure
        index = [(stops[sure] + rows).ravel(), (late + rows).ravel()]
        weight: list[NDArray[Any]] = [
            np.repeat(-self.nbytes[sure].astype(np.float64), plans),
            (saved[rest] * self.saved_nbytes[rest].astype(np.float64)[:, None]).ravel(),
        ]
        if len(self.held):
            grid = np.repeat(self.held_nbytes[:, None], plans, axis=1).ravel()
            index += [(self.held[:, None] + 1 + rows).ravel(), (lifetimes.copy_stops + rows).ravel()]
            weight += [grid, -grid]
        delta = np.bincount(np.concatenate(index), np.concatenate(weight), minlength=plans * width)
        live = np.cumsum(delta.reshape(plans, width), axis=1)[:, : self.size + 1]
        live += self.always
        for w, telling in self.copied.items():
            last = self._freed_at[w]
            freed = self.nbytes[last] @ ((stops[last] == w + 1) & ~lifetimes.taken[last])
            live[:, w] += np.where(saved[telling].any(axis=0), 0, np.maximum(self.nbytes[w] - freed, 0))
        return np.asarray(live, dtype=np.int64)

    # -- every plan ---------------------------------------------------------------------------------------------------

    def _lowest(self) -> tuple[Ints, Ints]:
        """Returns `tops` and `order`, sets `first_stop`: each buffer is freed or reused at the earliest place of any plan."""
        own = self.stored
        may_give, shortest = np.zeros(self.size, dtype=np.int64), self.shortest.tolist()
        for w, sources in self.sources:
            may_give[[v for v in sources if shortest[v] == w]] = 1
        self.first_stop = stops = self.shortest + 1 - may_give
        for v in self.joined_at:
            stops[v] = self.begin[v]
        delta = np.zeros(self.size + 2, dtype=np.int64)
        np.add.at(delta, self.begin[own], self.nbytes[own])
        np.add.at(delta, stops[own], -self.nbytes[own])
        base = np.cumsum(delta)[: self.size + 1] + self.fixed
        places = np.where(own, stops, self.begins_if_saved)
        order = np.argsort(places, kind="stable")
        bounds = np.concatenate([places[order], [self.size + 1]])
        first, behind = np.minimum(bounds[:-1], self.size), np.maximum(bounds[1:], bounds[:-1] + 1)
        runs = np.stack([first, np.minimum(behind, self.size + 1)], axis=1).ravel()
        return np.maximum.reduceat(np.append(base, 0), runs)[::2], order
