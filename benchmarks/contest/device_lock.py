"""A device that one process at a time computes on, while the others compile for it.

Kernels of Inductor try their configurations when they first run; another process's work beside that gave one source two speeds
(99 and 142 us on an H200).  So a process holds a lock on a file, but for the time that torch compiles in it.
Private names of torch, 2.11 to 2.15: `torch._dynamo.callback`.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._dynamo.callback import CallbackTrigger, callback_handler

COMPILING = (CallbackTrigger.DYNAMO, CallbackTrigger.LAZY_BACKWARD)
"""Dynamo's whole compilation of a frame, and that of a backward which waited for its first call."""


@contextmanager
def alone_but_to_compile(path: Path) -> Iterator[None]:
    """Run the body while no other process runs one with the same file, and let others run while torch compiles in the body.

    The operating system frees the lock of a process that ends, however it ends.  `torch.compiler.reset` in the body forgets to let
    others run.
    """
    with path.open("a") as file:

        def take(*_: Any) -> None:
            fcntl.flock(file, fcntl.LOCK_EX)

        def leave(arguments: Any) -> None:
            if arguments.callback_trigger in COMPILING:
                fcntl.flock(file, fcntl.LOCK_UN)

        take()
        callback_handler.register_start_callback(leave)
        callback_handler.register_end_callback(take)
        try:
            yield
        finally:
            if leave in callback_handler.start_callbacks:
                callback_handler.remove_start_callback(leave)
                callback_handler.remove_end_callback(take)
