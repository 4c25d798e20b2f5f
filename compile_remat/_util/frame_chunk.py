"""One piece of memory for the frames of a deep computation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SLOTS = 1 << 17
"""Of 8 bytes: as many are left behind the function's own, for the frames of what it calls."""


def frames_in_one_chunk(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, whose calls and what these call have their frames in one chunk of memory.

    CPython from 3.11 on keeps frames in chunks of 16 KiB: it maps a chunk when a call needs it and unmaps it when that call returns
    (``push_chunk`` and ``_PyThreadState_PopFrame`` in Python/pystate.c).  A loop whose calls cross from one chunk to the next pays
    for that in each turn.  A chunk is as large as the frame that it is made for needs, rounded up to a power of two, so a frame
    with a large stack of its own leaves room for many others.
    """

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=SLOTS)
    return functools.wraps(function)(call)
