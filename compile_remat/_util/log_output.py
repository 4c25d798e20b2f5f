"""Shows log messages in a program that has not configured Python's logging, which by default shows none below `warning`.

The command hides those of torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from compile_remat._util.user_warnings import torchs_hidden

LOG = logging.getLogger("compile_remat")


class _OnStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to stderr; prints nothing once the program, or torch, has handlers of its own, which get the messages as well."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and LOG.handlers == [self]:
            super().emit(record)


def show_from(level: str) -> None:
    """Show messages of `compile_remat` from a level on; they go to stderr unless the program has handlers of its own.

    ``TORCH_LOGS="+compile_remat"`` adds such a handler, torch's: then this level holds, and torch's handler shows the messages.

    Args:
        level: A level name of Python's logging, in upper or lower case.
    """
    LOG.setLevel(level.upper())
    if not LOG.hasHandlers():
        handler = _OnStderr()
        handler.setFormatter(logging.Formatter("compile_remat: %(message)s"))
        LOG.addHandler(handler)


@contextmanager
def torch_is_quiet() -> Iterator[None]:
    """Show neither torch's log messages nor warnings that point into torch; ``TORCH_LOGS`` or ``-W`` show them as ever.

    Torch must have been imported: the import sets the level of its logger.  Levels that the user's module sets for parts of torch
    hold.
    """
    log = logging.getLogger("torch")
    before = log.level
    with torchs_hidden() if not sys.warnoptions else nullcontext():
        if not os.environ.get("TORCH_LOGS"):
            log.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            log.setLevel(before)
