"""Values that the forward computes only because they are saved: derivatives of activations, masks, casts of weights.

Nothing in the forward reads such a value.  The forward computes the value last (the epilogue), and the buffers that its kernel
reads stay alive until then.  There are two exceptions.  A kernel of the forward writes its second output, such as a pooling's
offsets, with its first one.  The kernel of a pointwise buffer also writes values computed from that buffer alone, if they take no
more bytes: the mask of a ReLU, or the factors of a dropout's gradient (bfloat16) from random numbers (float32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compile_remat.passes.memory.buffers import may_be_written_over, overwrites
from compile_remat.passes.problem.problem import ITEM, POINTWISE, Value


@dataclass(frozen=True)
class Source:
    """A buffer of the forward that saved values of the epilogue read.

    Attributes:
        value: Index of the value in the buffer.
        readers: Indices of the epilogue's values that read the buffer, ascending.
        may_be_taken: True if the last reader can reuse the buffer in place.  A reader takes its first such source that is not
            saved.
        written_with: For the buffer of a pointwise value, the readers computed from this buffer alone: the buffer's kernel also
            writes these readers if they take no more bytes and no other reader waits for the buffer.
    """

    value: int
    readers: tuple[int, ...]
    may_be_taken: bool
    written_with: tuple[int, ...] = ()


def epilogue_sources(values: Sequence[Value], stored: Sequence[bool]) -> list[Source]:
    """Lists the forward's buffers that values of the epilogue read, ascending.

    Args:
        stored: True for a value that the forward writes to memory even if the plan does not save it, [values].
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
    """Indices of the forward's buffers, without outputs, that value `v` reads, directly or through values without such a buffer."""
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
    """Maps each value without a buffer of its own to the concatenation that stores the value; later readers read it there."""
    found: dict[int, int] = {}
    for w, value in enumerate(values):
        if value.in_forward and stored[w]:
            for part in value.parts:
                if values[part].in_forward and not stored[part]:
                    found.setdefault(part, w)
    return found
