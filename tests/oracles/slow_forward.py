"""The liveness of a plan's forward, place by place: a slow, plain reference without code of the passes."""

from __future__ import annotations

from collections.abc import Iterable, Set

from compile_remat.passes.problem.problem import (
    EXTERN,
    ITEM,
    POINTWISE,
    REDUCTION,
    Problem,
    Value,
)


def slow_forward_peak(problem: Problem, used: Iterable[int]) -> int:
    """Most bytes live in the forward.

    A saved value stays to the end, is written over by nobody, and has a buffer from its own place on if it had none: what was
    read for it is not read again for its readers.  A saved value that is no part of the forward is computed behind it: what it
    reads stays until then, until the last that might be saved, and it is written over it where it can be.
    """
    kept = {v for v in used if not problem.values[v].is_output}
    forward = _Forward(problem.values, frozenset(used))
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

    def __init__(self, values: tuple[Value, ...], saved: frozenset[int]) -> None:
        self.values, self.size = values, len(values)
        self.saved = saved
        self.readers = [[w for w, x in enumerate(values) if v in x.reads and x.in_forward] for v in range(self.size)]
        self.buffers = {v for v in range(self.size) if values[v].in_forward and self._has_buffer(v)}
        writers = sorted(self.buffers | {v for v in saved if values[v].in_forward})
        self.overwritten = {v: w for w in writers if values[w].kernel == POINTWISE for v in self._overwrites(w)}

    def _has_buffer(self, v: int) -> bool:
        node = self.values[v]
        by_kernel = node.kernel in (EXTERN, REDUCTION, ITEM) or node.realised or node.is_output
        return node.nbytes > 0 and (by_kernel or any(self.values[w].kernel == EXTERN for w in self.readers[v]))

    def is_kernel(self, v: int) -> bool:
        is_saved = v in self.saved and self.values[v].nbytes > 0
        return is_saved or self.values[v].kernel != POINTWISE or self._has_buffer(v)

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
        """True if a buffer is no part of another, and no part of it is read as long as the buffer itself."""
        return self._whole_of(v) < 0 and all(self.last_place(u) < self.last_place(v) for u in self._inside(v))

    def _sources_behind(self, w: int) -> set[int]:
        """Buffers that are read from memory to compute a value that is no part of the forward."""
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
        if node.is_snapshot:
            return False
        by_kernel = node.in_forward and (node.kernel in (EXTERN, REDUCTION, ITEM) or node.realised or node.is_output)
        return by_kernel or any(self.values[x].kernel == EXTERN for x in self.readers[v])

    def _place_of(self, v: int, w: int) -> int:
        """The value in whose buffer `w` reads `v`: the first concatenation of `v` before `w`, if `v` has no buffer; else `v`."""
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
        """The last place up to which saved values that are no part of the forward keep the buffer; -1 if none does."""
        if not self._waits(v, kept):
            return -1
        return self.size if self._taken_by(v, kept) in kept else self._readers_behind(v)[-1]

    def _waits(self, v: int, kept: set[int]) -> bool:
        """True if a buffer stays for values computed behind the forward; not for values computed of it alone that are small."""
        readers = set(self._readers_behind(v)) & kept
        with_it = {w for w in readers if self._is_of_one(w, v)}
        is_large = sum(self.values[w].nbytes for w in with_it) > self.values[v].nbytes
        return v not in kept and (readers > with_it or (bool(with_it) and is_large))

    def _is_of_one(self, w: int, v: int) -> bool:
        """True if a value behind the forward is computed of one pointwise buffer alone."""
        return self.values[v].kernel == POINTWISE and self._sources_behind(w) == {v}

    def _written_at(self, w: int, kept: set[int]) -> int:
        """The place at which a saved value is written: with the one buffer it is computed of, unless the buffer is kept longer."""
        if self.values[w].is_snapshot:
            return self.size
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
        """True if a value is written over a buffer that is held for it, so that it has no buffer of its own."""
        if self.values[w].in_forward:
            return False
        sources = (self._sources_behind(w) & self.buffers) - kept
        return any(self._taken_by(v, kept) == w and self._waits(v, kept) for v in sources)

    def _whole_of(self, v: int) -> int:
        """The concatenation that an unsaved part with a buffer lies in; -1 for none."""
        return -1 if v in self.saved else self._joined_to(v)

    def _joined_to(self, v: int) -> int:
        """The concatenation that a part is written into before it stands there: one that something else reads too; -1 for none."""
        if v not in self.buffers:
            return -1
        whole = next((w for w in sorted(self.buffers) if v in self.values[w].parts), -1)
        return whole if set(self.readers[v]) - {whole} else -1

    def _begins_at(self, w: int) -> int:
        """The place at which a buffer begins: a concatenation's with its first part, whose kernel writes into it, even if saved."""
        parts = [v for v in self.values[w].parts if self._joined_to(v) == w]
        return min([self._first_place(w), *map(self._first_place, parts)])

    def _inside(self, w: int) -> list[int]:
        return [v for v in self.values[w].parts if self._whole_of(v) == w]

    def _is_alive(self, v: int, place: int, kept: set[int]) -> bool:
        """True if a buffer that is not saved, or a part inside it, is read at or behind a place."""
        is_over = self.overwritten.get(v) == place
        is_read = (place <= self.last_place(v) and not is_over) or place <= self._read_behind(v, kept)
        return is_read or any(self._is_alive(part, place, kept) for part in self._inside(v))

    def _is_copied(self, w: int) -> bool:
        """True if a concatenation is copied for a reader, which happens after its parts are freed."""
        has_copy = self.values[w].transient_bytes >= self.values[w].nbytes and any(w in v.copies for v in self.values)
        return has_copy or bool(self.values[w].ordered_by)

    def _ends_at(self, v: int, place: int, kept: set[int]) -> bool:
        """True if a buffer that is no part of another is freed behind a place."""
        if v in kept or self._whole_of(v) >= 0 or self._begins_at(v) > place:
            return False
        is_taken = self.overwritten.get(v) == place + 1
        return self._is_alive(v, place, kept) and not is_taken and not self._is_alive(v, place + 1, kept)

    def live_bytes(self, place: int, kept: set[int]) -> int:
        """Bytes that live while node `place` runs (or at the end), if `kept` are saved."""
        runs = place < self.size and self.values[place].in_forward
        live = 0
        if runs:
            own = self.values[place]
            live = own.transient_bytes + own.workspace_bytes + own.observed_forward_bytes
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
            written = runs and self._first_place(v) == place != v  # even if nothing reads it
            live += self.values[v].nbytes if by_plan or by_itself or written else 0
        return live
