"""Keeps torch's log free of exceptions of ours by which a compilation is left on purpose."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch._functorch._aot_autograd import graph_compile
from torch._inductor import utils

from compile_remat.errors import find_error

_LOGS = [logging.getLogger(module.__name__) for module in (graph_compile, utils)]
_FOLDER_KEPT = "on error, temporary cache dir kept at %s"


@contextmanager
def unlogged(*kinds: type[Exception]) -> Iterator[None]:
    """In this context, torch does not log exceptions of these types, nor any that one of them has caused.

    For sizes that vary, torch compiles a backward before its first run, suppresses every error of it, and logs a warning with the
    traceback.  With ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1``, torch compiles in a temporary folder, keeps this folder after any
    error, and logs a warning; here the folder is removed.  Same in 2.11 to 2.15.
    """

    def is_logged(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else sys.exception()
        if error is None or all(find_error(error, kind) is None for kind in kinds):
            return True
        if record.msg == _FOLDER_KEPT and isinstance(record.args, tuple):
            shutil.rmtree(str(record.args[0]), ignore_errors=True)
        return False

    for log in _LOGS:
        log.addFilter(is_logged)
    try:
        yield
    finally:
        for log in _LOGS:
            log.removeFilter(is_logged)
