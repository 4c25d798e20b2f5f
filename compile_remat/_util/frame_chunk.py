"""Keeps the frames of a deep computation in one chunk of memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SLOTS = 1 << 17
"""Stack slots of 8 bytes that the function's frame reserves, which leaves at least as many for the frames of its callees."""


def frames_in_one_chunk(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Returns the function with its calls' frames, and those of its callees, in one chunk of memory.

    CPython from 3.11 on keeps frames in chunks of 16 KiB: it maps a chunk when a call needs it and unmaps it when that call returns
    (``push_chunk`` and ``_PyThreadState_PopFrame`` in Python/pystate.c).  A loop whose calls cross from one chunk to the next pays
    for both in each iteration.  CPython sizes a chunk for the frame that needs it, rounded up to a power of two, so a frame with a
    large stack leaves room for many other frames.
    """

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=SLOTS)
    return functools.wraps(function)(call)
