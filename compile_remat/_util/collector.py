"""Python's cyclic garbage collector, held back for the time of some work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Free by reference counts alone inside; the collector is as before afterwards, also behind an exception.

    Planning and lowering make hundreds of thousands of small objects and keep most of them until their end, beside the many that
    torch keeps.  The collector walks over them again and again and finds next to nothing.  Its first walk afterwards is over all
    that was made inside, and frees the graphs that were left.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
