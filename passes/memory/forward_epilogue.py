"""Values that the forward computes only because they are saved: derivatives of activations, masks, casts of weights.

Nothing in the forward reads such a value.  It is computed after everything else, and the buffers that its kernel reads stay alive
until then.  But what a kernel of the forward gives beside what the forward reads is written with that: a pooling's offsets.  And
what is computed of one pointwise buffer alone is written by that buffer's kernel, where it takes no more bytes: the mask of a ReLU,
and of random numbers the factors of a dropout's gradient, which are bfloat16 where the numbers are float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compile_remat.passes.memory.buffers import may_be_written_over, overwrites
from compile_remat.passes.problem.problem import ITEM, POINTWISE, Value


@dataclass(frozen=True)
class Source:
    """A buffer of the forward that values behind it read if they are saved.

    Attributes:
        value: Whose buffer it is.
        readers: Those values, in order.
        may_be_taken: Whether the last of them may be written over it: it takes the first of its sources that it may and that is not
            saved.
        written_with: Where the buffer is a pointwise value, readers that are computed of it alone: its kernel writes them too, if
            they take no more bytes and no other reader waits.
    """

    value: int
    readers: tuple[int, ...]
    may_be_taken: bool
    written_with: tuple[int, ...] = ()


def epilogue_sources(values: Sequence[Value], stored: Sequence[bool]) -> list[Source]:
    """All such buffers.

    Args:
        stored: Whether the forward writes a value to memory though it is not saved, [values].
    """
    readers: dict[int, list[int]] = {}
    read: dict[int, set[int]] = {}
    written = _written(values, stored)
    for v, value in enumerate(values):
        is_made_beside = value.kernel == ITEM and all(values[u].in_forward for u in value.reads)
        if not value.in_forward and value.is_saveable and value.nbytes and not is_made_beside:
            read[v] = _read_from_memory(v, values, stored, written)
            for u in read[v]:
                readers.setdefault(u, []).append(v)
    found = []
    for u in sorted(readers):
        last = readers[u][-1]
        may_be_taken = overwrites(values[last]) and may_be_written_over(values[u], values[last])
        written_with = tuple(v for v in readers[u] if values[u].kernel == POINTWISE and read[v] == {u})
        found.append(Source(u, tuple(readers[u]), may_be_taken, written_with))
    return found


def _read_from_memory(v: int, values: Sequence[Value], stored: Sequence[bool], written: Mapping[int, int]) -> set[int]:
    """Buffers of the forward that the value's kernel reads, or those of other such values that it reads."""
    found, seen, stack = set[int](), {v}, [v]
    while stack:
        reader = stack.pop()
        for u in values[reader].reads:
            u = written[u] if u in written and written[u] < reader else u
            if u in seen:
                continue
            seen.add(u)
            if values[u].in_forward and stored[u]:
                found |= set() if values[u].is_output else {u}
            elif not values[u].in_forward or values[u].kernel == POINTWISE:
                stack.append(u)
    return found


def _written(values: Sequence[Value], stored: Sequence[bool]) -> dict[int, int]:
    """The concatenation in which a value lies that has no buffer of its own: what stands behind it reads it there."""
    found: dict[int, int] = {}
    for w, value in enumerate(values):
        if value.in_forward and stored[w]:
            for part in value.parts:
                if values[part].in_forward and not stored[part]:
                    found.setdefault(part, w)
    return found
