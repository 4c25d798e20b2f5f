"""Pauses Python's cyclic garbage collector during some work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the collector in the body; afterwards it is as before, even after an exception.

    Planning and lowering create hundreds of thousands of small objects and keep most of them until their end, beside the many that
    torch keeps.  The collector would walk over these objects again and again and free next to none.  Its first walk afterwards
    covers all objects that the body created, and frees the graphs that were left.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
