"""Compiling outside of Dynamo, as Dynamo does it.  Private names of torch; the lock is the same in 2.11, 2.13 and 2.15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from compile_remat._torch.version import private_name

compile_lock = private_name("torch._dynamo.convert_frame", "compile_lock")
_session = getattr(torch.compiler, "_compile_session_context", nullcontext)
"""From 2.13 on: other threads, which call compiled functions meanwhile, are told that nobody traces these with FX."""


@contextmanager
def compile_session() -> Iterator[None]:
    """One compilation at a time in the process: FX and AOTAutograd keep what they trace in global variables.

    Dynamo takes the same lock, which a thread may take twice.  Never take a lock inside that is held when this is entered.
    """
    with compile_lock, _session():
        yield
