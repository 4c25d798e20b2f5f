"""Keeps torch's log free of exceptions of ours by which a compilation is left on purpose."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._functorch._aot_autograd import graph_compile

from compile_remat.errors import find_error

_LOG = logging.getLogger(graph_compile.__name__)


@contextmanager
def unlogged(*kinds: type[Exception]) -> Iterator[None]:
    """In this context, torch does not log exceptions of these types, nor any that one of them has caused.

    For sizes that vary, torch compiles a backward before its first run, suppresses every error of it, and logs a warning with the
    traceback.  Same in 2.11 to 2.15: the logger of ``torch._functorch._aot_autograd.graph_compile``.
    """

    def is_logged(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or all(find_error(error, kind) is None for kind in kinds)

    _LOG.addFilter(is_logged)
    try:
        yield
    finally:
        _LOG.removeFilter(is_logged)
